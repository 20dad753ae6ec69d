"""`StorageManager`: gives pages to caches and takes them back, moves them between tiers, and makes room.

Knows stores, pages, eviction order and the tree; knows no requests. A *store* is one pool group in one
tier, numbered tier by tier. Every change is journaled; nothing here commits.
"""

from collections.abc import Iterable, Sequence
from typing import cast

from manager.errors import LogicError
from manager.eviction import EvictionController, Lane
from manager.geometry import CacheGeometry
from manager.page import NONE, PageState, PageTable, without
from manager.pools.base import SlotCopy
from manager.radix_tree import BlockRadixTree
from manager.storage.journal import Journal
from manager.storage.slots import SlotAllocator
from manager.tier_moves import TierMoves

_COMMITTED = int(PageState.COMMITTED)
_PRIVATE = int(PageState.PRIVATE)


class StorageManager:
    """All pages of one worker.

    Attributes:
        pages: the records.
        tree: committed pages by token prefix.
        slots: per store, the free list.
        eviction: per store, the cached pages.
        moves: pages between tiers, and what leaves in the open transaction.
        pool_group_of: per layer group, its pool group; also its device store.
        num_pool_groups: stores per tier.
        groups_per_pool: layer groups of each pool group.
        has_lower_tiers: whether pages can be anywhere but on the device.
    """

    __slots__ = (
        "_journal",
        "eviction",
        "groups_per_pool",
        "has_lower_tiers",
        "moves",
        "num_pool_groups",
        "pages",
        "pool_group_of",
        "slots",
        "tree",
    )

    def __init__(self, geometry: CacheGeometry, journal: Journal) -> None:
        """Every slot is free."""
        self._journal = journal
        is_uniform = len(geometry.tiers) == len(geometry.layer_groups) == 1
        self.pages = PageTable(journal, is_uniform=is_uniform)
        self.tree = BlockRadixTree(geometry.tokens_per_block, len(geometry.layer_groups), journal)
        self.pool_group_of = [int(group.pool_group_id) for group in geometry.layer_groups]
        self.num_pool_groups = len(geometry.pool_groups)
        self.groups_per_pool = [len(pool.layer_group_ids) for pool in geometry.pool_groups]
        sizes = [pool.num_slots[level] for level in range(len(geometry.tiers)) for pool in geometry.pool_groups]
        registry: list[Lane] = []
        self.slots = [SlotAllocator(size, journal) for size in sizes]
        self.eviction = [EvictionController(self.pages, registry, journal) for _ in sizes]
        self.has_lower_tiers = len(self.slots) > self.num_pool_groups
        self.moves = TierMoves(self.pages, self.slots, self.eviction, self.num_pool_groups, journal)

    # -- room ----------------------------------------------------------------------------------------

    def available(self, pool_group: int) -> int:
        """Device slots that are free, or could be."""
        return len(self.slots[pool_group].free) + self.eviction[pool_group].evictable

    def counts(self, tier: int) -> tuple[int, int, int]:
        """Slots in all, free, and cached, of every pool group of the tier at this place."""
        stores = range(tier * self.num_pool_groups, (tier + 1) * self.num_pool_groups)
        total = sum(self.slots[store].num_slots for store in stores)
        free = sum(len(self.slots[store].free) for store in stores)
        return total, free, sum(self.eviction[store].evictable for store in stores)

    def claim_cost(self, page: int) -> int:
        """Device slots that a claim of this page would take from `available`."""
        return int(not self.moves.is_on_device(page) or not self.pages.locks[page])

    def num_below(self, pages: Sequence[int]) -> int:
        """Of these pages, how many are in lower tiers."""
        return sum(not self.moves.is_on_device(page) for page in pages)

    # -- pages on the device -------------------------------------------------------------------------

    def take(self, group: int, count: int) -> list[int]:
        """Make `count` private pages for a layer group, evicting as needed.

        Raises:
            OutOfPagesError: fewer are available; the journal's owner undoes what was done.
        """
        store = self.pool_group_of[group]
        slots = self.moves.take_slots(store, count)
        pages = self.pages.create(store, group, slots)
        self.moves.evictions.note_taken(store, slots, pages)
        return pages

    def untake(self, group: int, pages: Sequence[int]) -> list[int]:
        """Give back pages taken in this plan as if they never had been.

        Returns:
            Pages of other requests whose slot has changed, because theirs belongs to a page that came back.
        """
        if self.pages.remove_locks(pages):
            msg = f"pages {list(pages)} taken in this plan are locked by others"
            raise LogicError(msg)
        self._drop_clones(pages)
        self.pages.destroy(pages)
        return self.moves.evictions.give_back(self.pool_group_of[group], [self.pages.slot[page] for page in pages])

    def claim(self, group: int, pages: Sequence[int]) -> int:
        """Lock committed pages for one more user; `bring_up` promotes those in lower tiers, once all are locked.

        Returns:
            Device slots that this takes from `available`: cached pages, and places of those to be promoted.
        """
        store = self.pool_group_of[group]
        if not self.has_lower_tiers:
            fresh = self.pages.add_locks(pages)
            self.eviction[store].add(-fresh)
            return fresh
        locks, page_store = self.pages.locks, self.pages.store
        cached = [page_store[page] for page in pages if not locks[page]]
        self.pages.add_locks(pages)
        for at in set(cached):
            self.eviction[at].add(-cached.count(at))
        return cached.count(store) + sum(page_store[page] != store for page in pages)

    def can_take_over(self, page: int, ours: int) -> bool:
        """Whether a private page can give way to a tree page of the same content."""
        return self.moves.is_on_device(page) or self.pages.locks[ours] == 1

    def take_over(self, group: int, page: int, ours: int) -> None:
        """Lock a page of a lower tier by moving it, without a copy, into the slot of our private page."""
        store = self.pages.store[page]
        if not self.pages.locks[page]:
            self.eviction[store].add(-1)
        self.pages.add_locks((page,))
        self.moves.copies.free_later(store, self.pages.slot[page])
        self.pages.set_place(page, self.pool_group_of[group], self.pages.slot[ours])
        self.pages.remove_locks((ours,))
        self.pages.destroy((ours,))

    def unclaim(self, group: int, pages: Sequence[int]) -> list[int]:
        """Undo a claim of this plan: what is cached again returns to its old place in tier and order.

        Returns:
            As `untake`.
        """
        loose = without(pages, self.pages.remove_locks(pages))
        fills, locks = self.moves.copies.fills, self.pages.locks
        # One that was released here since it came up would have come up for that user alone: it stays. Pins are no
        # users: what is copied from it can be copied from below as well.
        is_used, pins = self.eviction[self.pool_group_of[group]].was_released_here, self.moves.pins
        promoted = [page for page in pages if page in fills and locks[page] == pins[page] and not is_used(page)]
        renamed = self.moves.unpromote(self.pool_group_of[group], promoted)
        private = [page for page in loose if self.pages.state[page] == _PRIVATE]  # of a fork's source that has ended
        for page in (*loose, *promoted):
            if self.pages.state[page] == _COMMITTED and not locks[page]:
                self.eviction[self.pages.store[page]].put_back(page)
        self.free(private)
        return renamed

    def clone(self, group: int, source: int) -> int:
        """Make a private page that starts with the content of a pinned one; the caller has checked for room."""
        (page,) = self.take(group, 1)
        self.moves.copies.add_clone(page, source)
        return page

    def clone_cost(self, source: int) -> int:
        """Device slots that a clone of this page takes from `available` until publish."""
        return 1 + (self.moves.is_on_device(source) and not self.pages.locks[source])

    def release(self, pages: Sequence[int], priority: int) -> None:
        """End one user's locks. Committed pages become cached, `pages[0]` the first to go; private ones are freed.

        Pages that only suspended caches need now leave the device where a lower tier has room.
        """
        state, locks = self.pages.state, self.pages.locks
        kept = [page for page in self.pages.remove_locks(pages) if state[page] == _COMMITTED]
        committed = [page for page in pages if state[page] == _COMMITTED]
        cached = without(committed, kept) if kept else committed
        for store, members in self._by_store(committed):
            self.eviction[store].push(members, priority)
        for store, members in self._by_store(cached):
            self.eviction[store].add(len(members))
        if len(committed) < len(pages):
            private = [page for page in pages if state[page] == _PRIVATE and not locks[page]]
            if private:
                self.free(private)
        if self.moves.holds:
            self.moves.move_down_held(pages)

    def free(self, pages: Sequence[int]) -> None:
        """Return the slots of unlocked pages of one state that are in no tree."""
        self._drop_clones(pages)
        self.pages.destroy(pages)
        slot = self.pages.slot
        for store, members in self._by_store(pages):
            slots = [slot[page] for page in members]
            if store < self.num_pool_groups:
                self.slots[store].give(slots)
            else:
                for place in slots:
                    self.moves.copies.free_later(store, place)

    def commit_pages(self, group: int, nodes: Sequence[int], pages: Sequence[int]) -> None:
        """Make private pages the nodes' pages: immutable, and reusable from now on."""
        self.tree.attach(group, nodes, pages)
        self.pages.commit(pages, nodes)

    # -- suspended caches ----------------------------------------------------------------------------

    def num_to_move(self, pages: Sequence[int]) -> int:
        """Of these pages, how many a suspension would have to move down."""
        locks, holds = self.pages.locks, self.moves.holds
        return sum(self.moves.is_on_device(page) and locks[page] == holds.get(page, 0) + 1 for page in pages)

    def hold(self, pages: Sequence[int]) -> list[int]:
        """A cache is suspended: its locks become holds, and what nobody else needs moves down.

        Returns:
            The pages moved. The caller has checked `lower_room`.
        """
        self.add_holds(pages)
        return self.moves.move_down_held(pages)

    def add_holds(self, pages: Sequence[int]) -> None:
        """Locks become holds; nothing moves."""
        for page in pages:
            self.moves.add_hold(page, 1)

    def unhold(self, pages: Sequence[int]) -> None:
        """Its holds become locks again; nothing moves."""
        for page in pages:
            self.moves.add_hold(page, -1)

    def bring_up(self, group: int, pages: Sequence[int]) -> int:
        """Promote those of a claimed or resumed cache's pages that are in lower tiers; returns how many."""
        store = self.pool_group_of[group]
        if not self.has_lower_tiers:
            return 0
        below = [page for page in pages if self.pages.store[page] != store]
        self.moves.promote(store, below)
        return len(below)

    def take_down(self, group: int, pages: Sequence[int]) -> list[int]:
        """Undo `bring_up` in the same plan, but for pages that others use now; returns renamed pages."""
        moves = self.moves
        unneeded = [page for page in pages if page in moves.copies.fills and moves.needs_only_suspended(page)]
        return moves.unpromote(self.pool_group_of[group], unneeded)

    # -- the end of a transaction --------------------------------------------------------------------

    def publish(self) -> list[SlotCopy]:
        """Let victims go. Journaled, so that even a bug in here can be undone; returns the fills to start."""
        pages, moves = self.pages, self.moves
        if moves.evictions.is_empty and moves.copies.is_empty and not moves.pins:
            return []
        fills = [
            SlotCopy(fill.source_store, fill.source_slot, pages.store[page], pages.slot[page])
            for page, fill in self.moves.copies.fills.items()
        ]
        # Behind the promotions, since a clone's source may be a promoted page.
        fills += [
            SlotCopy(pages.store[source], pages.slot[source], pages.store[page], pages.slot[page])
            for page, source in self.moves.copies.clones.items()
        ]
        self._unpin_all()
        for store, evicted in enumerate(self.moves.evictions.evicted):
            if not evicted:
                continue
            sent = self.moves.evictions.destinations
            dropped = [page for page in evicted if page not in sent] if sent else list(evicted)
            if len(self.pool_group_of) == 1:
                self.tree.detach(0, [pages.node[page] for page in dropped], dropped)
            else:
                for page in dropped:
                    self.tree.detach(pages.group[page], (pages.node[page],), (page,))
            pages.destroy(dropped)
            if store >= self.num_pool_groups:
                for page in evicted:
                    self.moves.copies.free_later(store, pages.slot[page])
        for page, (store, slot) in self.moves.evictions.destinations.items():
            priority = self.eviction[store].priority_of(page)
            pages.set_place(page, store, slot)
            pages.set_state((page,), PageState.COMMITTED)
            self.eviction[store].push((page,), priority)
            self.eviction[store].add(1)
        for store, slot in self.moves.copies.freed:
            self.slots[store].give((slot,))
        return fills

    def lose(self, store: int, slot: int) -> int | None:
        """A fill into this slot failed: its page leaves the tree; returns the page, or None when it has gone.

        The caller closes every cache that has it. The page keeps its users' locks, and one more that the caller
        releases when they are closed.
        """
        pages = self.pages
        page = next((page for page in pages.live() if pages.store[page] == store and pages.slot[page] == slot), None)
        if page is None:
            return None
        self.claim(pages.group[page], (page,))
        if pages.state[page] == _COMMITTED:
            self.tree.detach(pages.group[page], (pages.node[page],), (page,))
            pages.set_state((page,), PageState.PRIVATE)
        return page

    def changed_nodes(self) -> Iterable[int]:
        """Tree nodes whose pages came, went or moved in the open transaction, in order, as its journal has them."""
        put_pages, put_place = self.tree.put_pages, self.pages.put_place
        page_node, nodes = self.pages.node, dict[int, None]()
        for undo, arguments in self._journal.entries:
            if undo == put_pages:
                nodes.update(dict.fromkeys(cast("Sequence[int]", arguments[1])))
            elif undo == put_place:
                nodes[page_node[cast("int", arguments[0])]] = None
        nodes.pop(NONE, None)
        return nodes

    def forget(self) -> None:
        """The transaction is over and kept."""
        self.pages.publish()
        self.tree.publish()
        self.moves.evictions.clear()
        self.moves.copies.clear()

    def settle(self) -> None:
        """Tidy the eviction order; between transactions only."""
        for eviction in self.eviction:
            eviction.settle()

    def _by_store(self, pages: Sequence[int]) -> Iterable[tuple[int, Sequence[int]]]:
        if len(self.slots) == 1:
            return ((0, pages),) if pages else ()
        page_store = self.pages.store
        stores = sorted({page_store[page] for page in pages})
        return [(store, [page for page in pages if page_store[page] == store]) for store in stores]

    def _drop_clones(self, pages: Sequence[int]) -> None:
        if self.moves.copies.clones:
            for page in pages:
                if page in self.moves.copies.clones:
                    self.moves.drop_clone(page)

    def _unpin_all(self) -> None:
        """The copies are known: whoever was needed for them only is cached or free again."""
        for page, count in list(self.moves.pins.items()):
            loose = [self.moves.unpin(page) for _ in range(count)][-1]
            if loose and self.pages.state[page] == _COMMITTED:
                self.eviction[self.pages.store[page]].put_back(page)
            elif loose:
                self.free((page,))
