"""`KVCache`: one request's chain of blocks and its three lengths.

    0          committed           history              capacity
    |--------------|-------------------|--------------------|
     in the tree     computed, private   has a place only

num_committed_tokens <= history_length <= capacity, at all times. `capacity` is whole blocks.
Knows neither other requests nor transactions; every change is journaled by it or below it.
"""

from collections.abc import Sequence

from manager.cache_chain import CacheChain, CacheStatus
from manager.errors import LogicError
from manager.forking import Shared
from manager.ids import LayerGroupId
from manager.page import NONE, PageState
from manager.prefix_match import PrefixMatch, find_partial, find_prefix

_COMMITTED = int(PageState.COMMITTED)
_PRIVATE = int(PageState.PRIVATE)


def _present(pages: Sequence[int]) -> list[int]:
    """Without those that left the window."""
    return [page for page in pages if page != NONE] if NONE in pages else list(pages)


def _overlap(span: range, other: range) -> range:
    """Common part of two ranges; empty, and within `span`, where there is none."""
    first = min(max(span.start, other.start), span.stop)
    return range(first, max(first, min(span.stop, other.stop)))


class KVCache(CacheChain):
    """What happens to a request's cache; the state is in `CacheChain`."""

    __slots__ = ()

    # -- plan --------------------------------------------------------------------------------------

    def claim_prefix(self, token_ids: Sequence[int], limit: int, *, partial: bool) -> list[int]:
        """Find and lock the longest cached prefix of `token_ids[:limit]`; only for a new cache.

            0         claimed          cloned      history
            |--------------------|-------------------|---- - - |
              blocks of the tree   `partial`: a copy of a block that begins alike

        Returns:
            Per pool group, the pages that this takes from what is available.
        """
        size = self._geometry.tokens_per_block
        match = find_prefix(self._storage, self._geometry, self._layout, self.digests, token_ids, limit // size)
        costs = self._claim(match)
        if partial:
            sources, agreed = find_partial(self._storage, self._layout, self.digests, match.nodes, token_ids, limit)
            if agreed:
                self._clone(sources, agreed, costs)
        return costs

    def claim_whole(self, token_ids: Sequence[int]) -> list[int]:
        """Find and lock all blocks of `token_ids`, or none; only for a new cache. Returns as `claim_prefix`."""
        num_blocks = len(token_ids) // self._geometry.tokens_per_block
        match = find_prefix(self._storage, self._geometry, self._layout, self.digests, token_ids, num_blocks)
        if len(match.nodes) < num_blocks:
            match.shorten(0)
        return self._claim(match)

    def claim_shared(self, shared: Shared) -> list[int]:
        """Begin as another cache does: lock its full blocks once more, copy the block that both go on writing.

        Only for a new cache; `forking.find_shared` said that it can be done.

        Returns:
            Per pool group, the pages that this takes from what is available.
        """
        costs = [0] * self._storage.num_pool_groups
        for group, pages in zip(self._groups, shared.pages, strict=True):
            costs[self._storage.pool_group_of[group]] += self._storage.claim(group, _present(pages))
        self.pages = [list(pages) for pages in shared.pages]
        self._set_lengths(shared.num_blocks * self._geometry.tokens_per_block, shared.num_committed, shared.leaf)
        self._set_num_blocks(shared.num_blocks)
        self.num_claimed = shared.num_blocks
        self._write_tables(0)
        if shared.tail:
            self._clone(shared.tail, shared.num_tail_tokens, costs)
        if shared.draft_lag:
            self._set_draft_lag(shared.draft_lag)
        return costs

    def _claim(self, match: PrefixMatch) -> list[int]:
        costs, nodes = [0] * self._storage.num_pool_groups, match.nodes
        if not nodes:
            return costs
        history = len(nodes) * self._geometry.tokens_per_block
        for group, claimed in zip(self._groups, match.pages, strict=True):
            if self._has_windows:
                stale = self._stale(group, history)
                claimed[stale.start : stale.stop] = [NONE] * len(stale)
            costs[self._storage.pool_group_of[group]] += self._storage.claim(group, _present(claimed))
        self.pages = match.pages
        if self._storage.has_lower_tiers:
            # Only now, with all of them locked: a promotion may evict.
            for group, pages in zip(self._groups, self.pages, strict=True):
                self._storage.bring_up(group, _present(pages))
        self._set_lengths(history, len(nodes), nodes[-1])
        self._set_num_blocks(len(nodes))
        self.num_claimed = len(nodes)
        self._write_tables(0)
        return costs

    def _clone(self, sources: Sequence[int], num_tokens: int, costs: list[int]) -> None:
        for group, source in zip(self._groups, sources, strict=True):
            costs[self._storage.pool_group_of[group]] += self._storage.clone_cost(source)
            self._storage.moves.pin(source)
        for pages, group, source in zip(self.pages, self._groups, sources, strict=True):
            pages.append(self._storage.clone(group, source))
        self._set_lengths(self.history + num_tokens, self.num_committed, self._leaf)
        self._set_num_blocks(self.num_blocks + 1)
        self._write_tables(self.num_claimed)

    def growth_per_pool(self, num_blocks: int) -> list[int]:
        """Per pool group, the pages that `grow` would take: none for blocks that a transfer will not fill."""
        if not self._has_windows or not self.reserved_tokens:
            return [num_blocks * groups for groups in self._layout.groups_per_pool]
        span = range(self.num_blocks, self.num_blocks + num_blocks)
        costs = [0] * self._storage.num_pool_groups
        for group in self._groups:
            gone = _overlap(span, self._stale(group, self.reserved_tokens))
            costs[self._storage.pool_group_of[group]] += num_blocks - len(gone)
        return costs

    def grow(self, num_blocks: int) -> None:
        """Add private blocks. The caller has checked that they are available."""
        first = self.num_blocks
        for place, pages in enumerate(self.pages):
            group = self._groups[place]
            if self._has_windows:
                taken = self._take_in_window(group, range(first, first + num_blocks))
            else:
                taken = self._storage.take(group, num_blocks)
            pages.extend(taken)
            self._journal.push((self._trim, (place, first)))
            self._tables.write(place, first, taken)
        self._set_num_blocks(first + num_blocks)

    def _take_in_window(self, group: LayerGroupId, span: range) -> list[int]:
        """Pages for the blocks of `span`; NONE for those that have left the window when the transfer is done."""
        gone = _overlap(span, self._stale(group, self.reserved_tokens))
        taken = self._storage.take(group, len(span) - len(gone))
        at = gone.start - span.start
        return [*taken[:at], *[NONE] * len(gone), *taken[at:]]

    def ungrow(self, num_blocks: int) -> list[int]:
        """Undo growth of this plan back to `num_blocks`; returns renamed pages (`StorageManager.untake`)."""
        renamed = []
        for group, dropped in zip(self._groups, self._cut(num_blocks), strict=True):
            if dropped:
                renamed += self._storage.untake(group, _present(dropped))
        return renamed

    def unclaim(self) -> list[int]:
        """Undo the claim of a cache made in this plan; returns renamed pages."""
        renamed = []
        for group, pages in zip(self._groups, self.pages, strict=True):
            renamed += self._storage.unclaim(group, _present(pages[: self.num_claimed]))
        return renamed

    @property
    def num_history_blocks(self) -> int:
        """Blocks that hold computed positions."""
        return -(-self.history // self._geometry.tokens_per_block)

    def suspend(self) -> list[int]:
        """ACTIVE -> SUSPENDED: places without data are freed, what no active cache needs moves down.

        Returns:
            The pages moved. The caller has checked that there is room, and takes the index slot.
        """
        for dropped in self._cut(self.num_history_blocks):
            self._storage.release(_present(dropped)[::-1], self.priority)
        moved = []
        for pages in self.pages:
            moved += self._storage.hold(_present(pages))
        self._set_status(CacheStatus.SUSPENDED)
        return moved

    def resume(self) -> list[int]:
        """SUSPENDED -> ACTIVE: every page comes to the device; returns device slots taken per pool group."""
        costs = [0] * self._storage.num_pool_groups
        for group, pages in zip(self._groups, self.pages, strict=True):
            present = _present(pages)
            self._storage.unhold(present)
            costs[self._storage.pool_group_of[group]] += self._storage.bring_up(group, present)
        self._set_status(CacheStatus.ACTIVE)
        self._tables.keep(0, self.num_blocks)
        self._write_tables(0)
        return costs

    def unresume(self) -> list[int]:
        """Undo `resume` in the same plan; returns renamed pages."""
        renamed = []
        for group, pages in zip(self._groups, self.pages, strict=True):
            present = _present(pages)
            self._storage.add_holds(present)
            renamed += self._storage.take_down(group, present)
        self._set_status(CacheStatus.SUSPENDED)
        return renamed

    def pages_below(self) -> list[int]:
        """Per pool group, pages that a resume would bring to the device."""
        costs = [0] * self._storage.num_pool_groups
        for group, pages in zip(self._groups, self.pages, strict=True):
            costs[self._storage.pool_group_of[group]] += self._storage.num_below(_present(pages))
        return costs

    def rename(self, page: int) -> None:
        """`page` has another slot now: correct the table if it is ours."""
        place = self._storage.pages.group[page] - self._first_group
        if not self.is_suspended and 0 <= place < len(self.pages) and page in self.pages[place]:
            self._tables.write_entry(place, self.pages[place].index(page), page)

    # -- complete ----------------------------------------------------------------------------------

    def advance(self, token_ids: Sequence[int], history: int, *, reuse: bool, draft_lag: int = 0) -> None:
        """History is `history` now; blocks that are full become committed when `reuse`.

        The draft layers have all of it but the last `draft_lag` positions.

        Raises:
            LogicError: beyond capacity, beyond the known tokens, or backwards.
        """
        size, before = self._geometry.tokens_per_block, self.history
        if not before <= history <= self.num_blocks * size or history > len(token_ids):
            msg = (
                f"{self.request_id}: history {before} -> {history} with capacity {self.capacity} "
                f"and {len(token_ids)} known tokens"
            )
            raise LogicError(msg)
        self._journal.push((self.put_history, (before,)))
        self.history = history
        if draft_lag != self.draft_lag:
            self._set_draft_lag(draft_lag)
        full = (history - draft_lag) // size
        if reuse and full > self.num_committed:
            self.digests.extend(token_ids, full)
            self._commit(full)
        if self._has_windows:
            # Drafts can be rewound to the last committed block, or by one block where nothing is committed.
            self._leave_window(self.num_committed * size if reuse else history - size)

    def rewind(self, num_tokens: int) -> None:
        """Take back positions that are not committed.

        Raises:
            LogicError: they are committed, more than there are, or what they see has left the window.
        """
        history = self.history - num_tokens
        if num_tokens < 0 or history < max(self.num_committed, self._num_shared) * self._geometry.tokens_per_block:
            kept = f"{self.num_committed} blocks are committed, {self._num_shared} shared"
            msg = f"{self.request_id}: cannot rewind {num_tokens} of {self.history} positions: {kept}"
            raise LogicError(msg)
        for group, pages in zip(self._groups, self.pages, strict=True):
            stale = self._stale(group, history)
            if any(page == NONE and block not in stale for block, page in enumerate(pages)):
                msg = f"{self.request_id}: a query at position {history} sees pages that have left the window"
                raise LogicError(msg)
        self._set_lengths(history, self.num_committed, self._leaf)
        if self.draft_lag:
            self._set_draft_lag(max(0, self.draft_lag - num_tokens))

    @property
    def _num_shared(self) -> int:
        """Full blocks up to the last private one that a fork or its source has, too: only without reuse there are any.

        They must not be written again.
        """
        state, locks = self._storage.pages.state, self._storage.pages.locks
        full = self.history // self._geometry.tokens_per_block
        return max(
            (
                block + 1
                for pages in self.pages
                for block, page in enumerate(pages[self.num_committed : full], start=self.num_committed)
                if page != NONE and state[page] == _PRIVATE and locks[page] > 1
            ),
            default=0,
        )

    def _set_draft_lag(self, draft_lag: int) -> None:
        self._journal.push((self._put_draft_lag, (self.draft_lag,)))
        self.draft_lag = draft_lag

    def reserve(self, num_tokens: int) -> None:
        """Positions [history, num_tokens) wait for a transfer; 0 ends that."""
        self._journal.push((self._put_reserved, (self.reserved_tokens,)))
        self.reserved_tokens = num_tokens

    def release(self) -> None:
        """Let every page go, deepest block first, so that no block outlives its parent in the cache."""
        if not self._has_windows and len(self.pages) == 1:
            present = self.pages[0][::-1]
        else:  # by block, since layer groups can share a store
            present = [page for block in zip(*self.pages, strict=True) for page in block if page != NONE][::-1]
        if self.is_suspended:
            self._storage.unhold(present)
        self._storage.release(present, self.priority)

    # -- inside ------------------------------------------------------------------------------------

    def _commit(self, full: int) -> None:
        tree, digests = self._storage.tree, self.digests
        leaf = self._leaf if self._leaf != NONE else tree.root(digests)
        block = self.num_committed
        while block < full:
            node = tree.by_digest.get(digests.chain[block], NONE)
            if node == NONE:
                # A node that is missing has no children, so the rest is missing, too.
                nodes = tree.insert_chain(leaf, digests, block, full)
                self._commit_new(nodes, block)
                block, leaf = full, nodes[-1]
                break
            if not tree.matches(node, leaf, digests, block):
                break  # A digest that means two things: the rest of this cache stays private.
            if not all(self._can_commit(group, node, block) for group in self._groups):
                break
            for group in self._groups:
                self._commit_page(group, node, block)
            leaf = node
            block += 1
        last = leaf
        # The leaf must stay in the tree, so it needs a page of ours: what a transfer brought may end in blocks that
        # had left every window. They are committed with the next block that has one.
        while block > self.num_committed and all(pages[block - 1] == NONE for pages in self.pages):
            block, leaf = block - 1, tree.parent[leaf]
        if self._has_windows or block == self.num_committed:  # else the last node has pages of ours
            tree.prune(last)
        if block > self.num_committed:
            self._set_lengths(self.history, block, leaf)

    def _commit_new(self, nodes: list[int], first: int) -> None:
        for group, column in zip(self._groups, self.pages, strict=True):
            pages = column[first : first + len(nodes)]
            if NONE in pages:
                present = [place for place, page in enumerate(pages) if page != NONE]
                self._storage.commit_pages(group, [nodes[at] for at in present], [pages[at] for at in present])
            else:
                self._storage.commit_pages(group, nodes, pages)

    def _can_commit(self, group: int, node: int, block: int) -> bool:
        """Not where a lease needs our page and the tree's is in a lower tier: the block stays private until later."""
        ours, present = self.pages[group - self._first_group][block], self._storage.tree.pages[group][node]
        return NONE in (ours, present) or self._storage.can_take_over(present, ours)

    def _commit_page(self, group: int, node: int, block: int) -> None:
        """Commit our page, or, where the tree has one of the same content, use that and free ours.

        One copy per content keeps parents locked as long as their children are, and costs no copy: by
        E1 both pages hold the same bits. Where the tree's is in a lower tier it takes over our slot.
        """
        storage, place = self._storage, group - self._first_group
        pages = self.pages[place]
        ours, present = pages[block], storage.tree.pages[group][node]
        if ours == NONE:
            return
        if present == NONE:
            storage.commit_pages(group, (node,), (ours,))
            return
        if storage.num_below((present,)):
            storage.take_over(group, present, ours)
        else:
            storage.claim(group, (present,))
            storage.release((ours,), self.priority)
        pages[block] = present
        self._journal.push((pages.__setitem__, (block, ours)))
        self._tables.write_entry(place, block, present)

    def _leave_window(self, history: int) -> None:
        """Release pages that no query from position `history` on can see."""
        for place, group in enumerate(self._groups):
            stale = self._stale(group, history)
            first = max(stale.start, self._num_passed[place])
            if first >= stale.stop:
                continue
            pages = self.pages[place]
            gone = [block for block in range(first, stale.stop) if pages[block] != NONE]
            self._storage.release([pages[block] for block in reversed(gone)], self.priority)
            for block in gone:
                self._journal.push((pages.__setitem__, (block, pages[block])))
                pages[block] = NONE
                self._tables.write_entry(place, block, NONE)
            self._journal.push((self._num_passed.__setitem__, (place, self._num_passed[place])))
            self._num_passed[place] = stale.stop
