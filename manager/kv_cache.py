"""`KVCache`: one request's chain of blocks and its three lengths.

    0          committed           history              capacity
    |--------------|-------------------|--------------------|
     in the tree     computed, private   has a place only

num_committed_tokens <= history_length <= capacity, at all times. `capacity` is whole blocks.
Knows neither other requests nor transactions; every change is journaled by it or below it.
"""

from collections.abc import Sequence
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from manager.block_tables import BlockTables
from manager.errors import LogicError
from manager.geometry import CacheGeometry
from manager.ids import BlockOrdinal, LayerGroupId, RequestId, SlotId
from manager.page import NONE, PageState
from manager.page_location import PageLocation
from manager.prefix_match import find_prefix
from manager.radix_tree import BlockDigests
from manager.storage.journal import Journal
from manager.storage_manager import StorageManager

_COMMITTED = int(PageState.COMMITTED)


def _present(pages: Sequence[int]) -> list[int]:
    """Without those that left the window."""
    return [page for page in pages if page != NONE]


class CacheStatus(StrEnum):
    """Whether the request can run."""

    ACTIVE = "active"
    SUSPENDED = "suspended"


class KVCache:
    """Pages of one request.

    Attributes:
        request_id: whose it is.
        status: active, or suspended.
        priority: of the request; decides how long its blocks stay cached.
        index_slot: row of the per-sequence tables; NONE while suspended.
        history: positions already computed.
        num_blocks: blocks that have a place.
        num_committed: blocks that are in the tree.
        num_claimed: blocks found in the cache when it was created.
        reserved_tokens: positions whose pages wait for a transfer and must not be written by a step; 0 once
            activated, and for a cache that is computed here.
        pages: per layer group, page record per block; NONE where a page left the window.
        digests: of its full blocks, as far as hashed.
    """

    __slots__ = (
        "_geometry",
        "_journal",
        "_leaf",
        "_storage",
        "_tables",
        "digests",
        "history",
        "index_slot",
        "num_blocks",
        "num_claimed",
        "num_committed",
        "pages",
        "priority",
        "request_id",
        "reserved_tokens",
        "status",
    )

    def __init__(
        self,
        request_id: RequestId,
        digests: BlockDigests,
        geometry: CacheGeometry,
        storage: StorageManager,
        journal: Journal,
    ) -> None:
        """Start empty and active."""
        self._geometry = geometry
        self._storage = storage
        self._journal = journal
        self.request_id = request_id
        self.digests = digests
        self.status = CacheStatus.ACTIVE
        self.priority = 0
        self.index_slot = NONE
        self.history = 0
        self.num_blocks = 0
        self.num_committed = 0
        self.num_claimed = 0
        self.reserved_tokens = 0
        self.pages: list[list[int]] = [[] for _ in geometry.layer_groups]
        self._leaf = NONE
        self._tables = BlockTables(len(geometry.layer_groups), storage.pages, journal)

    @property
    def capacity(self) -> int:
        """Positions that have a place."""
        return self.num_blocks * self._geometry.tokens_per_block

    def block_table(self, group: int) -> npt.NDArray[np.int32]:
        """[num_blocks] device slots, read-only; a view of the buffer."""
        return self._tables.view(group, self.num_blocks)

    # -- plan --------------------------------------------------------------------------------------

    def claim_prefix(self, token_ids: Sequence[int], max_blocks: int) -> list[int]:
        """Find and lock the longest cached prefix of at most `max_blocks` blocks; only for a new cache.

        Returns:
            Per pool group, the pages that were cached until now.
        """
        costs = [0] * self._storage.num_pool_groups
        nodes = find_prefix(self._storage, self.digests, token_ids, max_blocks)
        if not nodes:
            return costs
        for group, pages in enumerate(self.pages):
            column = self._storage.tree.pages[group]
            claimed = [column[node] for node in nodes]
            costs[self._storage.pool_group_of[group]] += self._storage.claim(group, claimed)
            pages.extend(claimed)
        self._set_lengths(len(nodes) * self._geometry.tokens_per_block, len(nodes), nodes[-1])
        self._set_num_blocks(len(nodes))
        self.num_claimed = len(nodes)
        self._write_tables(0)
        return costs

    def grow(self, num_blocks: int) -> None:
        """Add private blocks. The caller has checked that they are available."""
        first = self.num_blocks
        for group, pages in enumerate(self.pages):
            taken = self._storage.take(group, num_blocks)
            pages.extend(taken)
            self._journal.push((self._trim, (group, len(pages) - len(taken))))
        self._set_num_blocks(first + num_blocks)
        self._write_tables(first)

    def ungrow(self, num_blocks: int) -> list[int]:
        """Undo growth of this plan back to `num_blocks`; returns renamed pages (`StorageManager.untake`)."""
        renamed = []
        for group, dropped in enumerate(self._cut(num_blocks)):
            if dropped:
                renamed += self._storage.untake(group, dropped)
        return renamed

    def unclaim(self) -> list[int]:
        """Undo the claim of a cache made in this plan; returns renamed pages."""
        renamed = []
        for group, pages in enumerate(self.pages):
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
        for group, pages in enumerate(self.pages):
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
        for group, pages in enumerate(self.pages):
            present = _present(pages)
            self._storage.add_holds(present)
            renamed += self._storage.take_down(group, present)
        self._set_status(CacheStatus.SUSPENDED)
        return renamed

    def pages_below(self) -> list[int]:
        """Per pool group, pages that a resume would bring to the device."""
        costs = [0] * self._storage.num_pool_groups
        for group, pages in enumerate(self.pages):
            costs[self._storage.pool_group_of[group]] += self._storage.num_below(_present(pages))
        return costs

    def rename(self, page: int) -> None:
        """`page` has another slot now: correct the table if it is ours."""
        group = self._storage.pages.group[page]
        if not self.is_suspended and page in self.pages[group]:
            self._tables.write_entry(group, self.pages[group].index(page), page)

    # -- complete ----------------------------------------------------------------------------------

    def advance(self, token_ids: Sequence[int], history: int, *, reuse: bool) -> None:
        """History is `history` now; blocks that are full become committed when `reuse`.

        Raises:
            LogicError: beyond capacity, beyond the known tokens, or backwards.
        """
        if not self.history <= history <= min(self.capacity, len(token_ids)):
            msg = (
                f"{self.request_id}: history {self.history} -> {history} with capacity {self.capacity} "
                f"and {len(token_ids)} known tokens"
            )
            raise LogicError(msg)
        self._set_lengths(history, self.num_committed, self._leaf)
        full = history // self._geometry.tokens_per_block
        if reuse and full > self.num_committed:
            self.digests.extend(token_ids, full)
            self._commit(full)

    def rewind(self, num_tokens: int) -> None:
        """Take back positions that are not committed.

        Raises:
            LogicError: they are committed, or more than there are.
        """
        history = self.history - num_tokens
        if num_tokens < 0 or history < self.num_committed * self._geometry.tokens_per_block:
            kept = f"{self.num_committed} blocks are committed"
            msg = f"{self.request_id}: cannot rewind {num_tokens} of {self.history} positions: {kept}"
            raise LogicError(msg)
        self._set_lengths(history, self.num_committed, self._leaf)

    def reserve(self, num_tokens: int) -> None:
        """Positions [history, num_tokens) wait for a transfer; 0 ends that."""
        self._journal.push((self._put_reserved, (self.reserved_tokens,)))
        self.reserved_tokens = num_tokens

    @property
    def is_suspended(self) -> bool:
        """Whether it cannot run before a resume."""
        return self.status is CacheStatus.SUSPENDED

    @property
    def is_reservation(self) -> bool:
        """Whether it waits for a transfer."""
        return self.reserved_tokens > 0

    @property
    def filling_blocks(self) -> tuple[int, int]:
        """Blocks [first, last) that the transfer fills."""
        size = self._geometry.tokens_per_block
        return self.history // size, -(-self.reserved_tokens // size)

    def release(self) -> None:
        """Let every page go, deepest block first, so that no block outlives its parent in the cache."""
        for pages in self.pages:
            present = _present(pages)
            if self.is_suspended:
                self._storage.unhold(present)
            self._storage.release(present[::-1], self.priority)

    def locate(self, first: int, last: int) -> tuple[PageLocation, ...]:
        """Pages of blocks [first, last), by block then layer group; pages that left the window are skipped."""
        slot = self._storage.pages.slot
        return tuple(
            PageLocation(BlockOrdinal(block), LayerGroupId(group), SlotId(slot[pages[block]]))
            for block in range(first, last)
            for group, pages in enumerate(self.pages)
            if pages[block] != NONE
        )

    @property
    def leaf(self) -> int:
        """Tree node of the last committed block, or NONE."""
        return self._leaf

    # -- inside ------------------------------------------------------------------------------------

    def _commit(self, full: int) -> None:
        tree, digests = self._storage.tree, self.digests
        leaf = self._leaf if self._leaf != NONE else tree.root(digests)
        block = self.num_committed
        while block < full:
            node = tree.by_digest.get(digests.chain[block], NONE)
            if node == NONE:
                node = tree.insert(leaf, digests, block)
            elif not tree.matches(node, leaf, digests, block):
                break  # A digest that means two things: the rest of this cache stays private.
            if not all(self._can_commit(group, node, block) for group in range(len(self.pages))):
                break
            for group in range(len(self.pages)):
                self._commit_page(group, node, block)
            leaf = node
            block += 1
        tree.prune(leaf)
        if block > self.num_committed:
            self._set_lengths(self.history, block, leaf)

    def _can_commit(self, group: int, node: int, block: int) -> bool:
        """Not where a lease needs our page and the tree's is in a lower tier: the block stays private until later."""
        ours, present = self.pages[group][block], self._storage.tree.pages[group][node]
        return NONE in (ours, present) or self._storage.can_take_over(present, ours)

    def _commit_page(self, group: int, node: int, block: int) -> None:
        """Commit our page, or, where the tree has one of the same content, use that and free ours.

        One copy per content keeps parents locked as long as their children are, and costs no copy: by
        E1 both pages hold the same bits. Where the tree's is in a lower tier it takes over our slot.
        """
        storage, pages = self._storage, self.pages[group]
        ours, present = pages[block], storage.tree.pages[group][node]
        if ours == NONE:
            return
        if present == NONE:
            storage.commit_page(group, node, ours)
            return
        if storage.num_below((present,)):
            storage.take_over(group, present, ours)
        else:
            storage.claim(group, (present,))
            storage.release((ours,), self.priority)
        pages[block] = present
        self._journal.push((pages.__setitem__, (block, ours)))
        self._tables.write_entry(group, block, present)

    def _set_lengths(self, history: int, num_committed: int, leaf: int) -> None:
        self._journal.push((self._put_lengths, (self.history, self.num_committed, self._leaf)))
        self._put_lengths(history, num_committed, leaf)

    def _put_lengths(self, history: int, num_committed: int, leaf: int) -> None:
        self.history = history
        self.num_committed = num_committed
        self._leaf = leaf

    def _set_num_blocks(self, num_blocks: int) -> None:
        self._journal.push((self._put_num_blocks, (self.num_blocks,)))
        self.num_blocks = num_blocks

    def _write_tables(self, first: int) -> None:
        for group, pages in enumerate(self.pages):
            self._tables.write(group, first, pages[first:])

    def _set_status(self, status: CacheStatus) -> None:
        self._journal.push((self._put_status, (self.status,)))
        self.status = status

    def _put_status(self, status: CacheStatus) -> None:
        self.status = status

    def _cut(self, num_blocks: int) -> list[list[int]]:
        """Shorten the chain to `num_blocks`; returns per layer group the pages cut off."""
        self._tables.keep(num_blocks, self.num_blocks)
        cut = []
        for pages in self.pages:
            dropped = pages[num_blocks:]
            del pages[num_blocks:]
            self._journal.push((pages.extend, (dropped,)))
            cut.append(dropped)
        self._set_num_blocks(num_blocks)
        return cut

    def _put_num_blocks(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks

    def _put_reserved(self, num_tokens: int) -> None:
        self.reserved_tokens = num_tokens

    def _trim(self, group: int, count: int) -> None:
        del self.pages[group][count:]
