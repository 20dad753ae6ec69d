"""`StorageManager`: gives pages to caches and takes them back, moves them between tiers, and makes room.

Knows stores, pages, eviction order and the tree; knows no requests. A *store* is one pool group in one
tier, numbered tier by tier. Every change is journaled; nothing here commits.
"""

from collections.abc import Sequence

from manager.errors import LogicError
from manager.eviction import EvictionController, Lane
from manager.geometry import CacheGeometry
from manager.page import NONE, PageState, PageTable
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
    """

    __slots__ = (
        "_journal",
        "eviction",
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
        self.pages = PageTable(journal)
        self.tree = BlockRadixTree(geometry.tokens_per_block, len(geometry.layer_groups), journal)
        self.pool_group_of = [int(group.pool_group_id) for group in geometry.layer_groups]
        self.num_pool_groups = len(geometry.pool_groups)
        sizes = [pool.num_slots[level] for level in range(len(geometry.tiers)) for pool in geometry.pool_groups]
        registry: list[Lane] = []
        self.slots = [SlotAllocator(size, journal) for size in sizes]
        self.eviction = [EvictionController(self.pages, registry, journal) for _ in sizes]
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

    @property
    def has_lower_tiers(self) -> bool:
        """Whether pages can be anywhere but on the device."""
        return len(self.slots) > self.num_pool_groups

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
        slots, num_evicted = self.moves.take_slots(store, count)
        pages = self.pages.create(store, group, slots)
        self.moves.evictions.note_taken(store, slots, pages, num_evicted=num_evicted)
        return pages

    def untake(self, group: int, pages: Sequence[int]) -> list[int]:
        """Give back pages taken in this plan as if they never had been.

        Returns:
            Pages of other requests whose slot has changed, because theirs belongs to a page that came back.
        """
        if self.pages.remove_locks(pages) != list(pages):
            msg = f"pages {list(pages)} taken in this plan are locked by others"
            raise LogicError(msg)
        self.pages.destroy(pages)
        return self.moves.evictions.give_back(self.pool_group_of[group], [self.pages.slot[page] for page in pages])

    def claim(self, group: int, pages: Sequence[int]) -> int:
        """Lock committed pages for one more user, promoting those in lower tiers.

        Returns:
            Device slots that left `available`: cached pages that were pinned, and places of promoted ones.
        """
        store = self.pool_group_of[group]
        locks, page_store = self.pages.locks, self.pages.store
        cached = [page_store[page] for page in pages if not locks[page]]
        self.pages.add_locks(pages)
        for at in set(cached):
            self.eviction[at].add(-cached.count(at))
        below = [page for page in pages if page_store[page] != store]
        self.moves.promote(store, below)
        return cached.count(store) + len(below)

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
        loose = self.pages.remove_locks(pages)
        renamed = self.moves.unpromote(self.pool_group_of[group], loose)
        for page in loose:
            self.eviction[self.pages.store[page]].put_back(page)
        return renamed

    def release(self, pages: Sequence[int], priority: int) -> None:
        """End one user's locks. Committed pages become cached, `pages[0]` the first to go; private ones are freed.

        Pages that only suspended caches need now leave the device where a lower tier has room.
        """
        state, page_store = self.pages.state, self.pages.store
        loose = self.pages.remove_locks(pages)
        committed = [page for page in pages if state[page] == _COMMITTED]
        for store in {page_store[page] for page in committed}:
            self.eviction[store].push([page for page in committed if page_store[page] == store], priority)
        for page in loose:
            if state[page] == _COMMITTED:
                self.eviction[page_store[page]].add(1)
        private = [page for page in loose if state[page] == _PRIVATE]
        if private:
            self.free(private)
        if self.moves.holds:
            self.moves.move_down_held(pages)

    def free(self, pages: Sequence[int]) -> None:
        """Return the slots of unlocked pages that are in no tree."""
        self.pages.destroy(pages)
        for store in {self.pages.store[page] for page in pages}:
            slots = [self.pages.slot[page] for page in pages if self.pages.store[page] == store]
            if store < self.num_pool_groups:
                self.slots[store].give(slots)
            else:
                for slot in slots:
                    self.moves.copies.free_later(store, slot)

    def commit_page(self, group: int, node: int, page: int) -> None:
        """Make a private page the node's page: immutable, and reusable from now on."""
        self.tree.attach(group, node, page)
        self.pages.set_state((page,), PageState.COMMITTED)
        self.pages.node[page] = node
        self._journal.push((self.pages.node.__setitem__, (page, NONE)))

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
        """Promote those of a resumed cache's pages that are in lower tiers; returns how many."""
        store = self.pool_group_of[group]
        below = [page for page in pages if self.pages.store[page] != store]
        self.moves.promote(store, below)
        return len(below)

    def take_down(self, group: int, pages: Sequence[int]) -> list[int]:
        """Undo `bring_up` in the same plan, but for pages that others use now; returns renamed pages."""
        locks, holds = self.pages.locks, self.moves.holds
        return self.moves.unpromote(
            self.pool_group_of[group], [page for page in pages if locks[page] == holds.get(page, 0)]
        )

    # -- the end of a transaction --------------------------------------------------------------------

    def publish(self) -> list[SlotCopy]:
        """Let victims go. Journaled, so that even a bug in here can be undone; returns the fills to start."""
        pages = self.pages
        fills = [
            SlotCopy(fill.source_store, fill.source_slot, pages.store[page], pages.slot[page])
            for page, fill in self.moves.copies.fills.items()
        ]
        for store, evicted in enumerate(self.moves.evictions.evicted):
            dropped = [page for page in evicted if page not in self.moves.evictions.destinations]
            for page in dropped:
                self.tree.detach(pages.group[page], pages.node[page])
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
            self.tree.detach(pages.group[page], pages.node[page])
            pages.set_state((page,), PageState.PRIVATE)
        return page

    def forget(self) -> None:
        """The transaction is over and kept."""
        self.pages.publish()
        self.moves.evictions.clear()
        self.moves.copies.clear()

    def settle(self) -> None:
        """Tidy the eviction order; between transactions only."""
        for eviction in self.eviction:
            eviction.settle()
