"""`StorageManager`: gives pages to caches and takes them back, and makes room by evicting cached ones.

Knows stores, pages, eviction order and the tree; knows no requests. A *store* is one pool group in one
tier, numbered tier by tier. Every change is journaled; nothing here commits.

Inside a plan an evicted page is only LEAVING: its slot was granted on, its data is still there, and no
look-up may return it. Publish takes it out of the tree. A revert (`untake`) brings back the page that was
evicted last, whoever got its slot, so that what remains is what would have been evicted without it.
"""

from collections.abc import Sequence

from manager.errors import LogicError
from manager.eviction import EvictionController, Lane
from manager.geometry import CacheGeometry
from manager.page import NONE, PageState, PageTable
from manager.radix_tree import BlockRadixTree
from manager.storage.journal import Journal
from manager.storage.slots import SlotAllocator

_COMMITTED = int(PageState.COMMITTED)
_PRIVATE = int(PageState.PRIVATE)


class StorageManager:
    """All pages of one worker.

    Attributes:
        pages: the records.
        tree: committed pages by token prefix.
        slots: per store, the free list.
        eviction: per store, the cached pages.
        pool_group_of: per layer group, its pool group; also its device store.
        num_pool_groups: stores per tier.
    """

    __slots__ = (
        "_evicted",
        "_granted_on",
        "_journal",
        "eviction",
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
        self._evicted: list[list[int]] = [[] for _ in sizes]
        # Slots that were taken from evicted pages in this plan, and the page that has each now.
        self._granted_on: list[dict[int, int]] = [{} for _ in sizes]

    def available(self, pool_group: int) -> int:
        """Device slots that are free, or could be."""
        return len(self.slots[pool_group].free) + self.eviction[pool_group].evictable

    def take(self, group: int, count: int) -> list[int]:
        """Make `count` private pages for a layer group, evicting as needed.

        Raises:
            OutOfPagesError: fewer are available; the journal's owner undoes what was done.
        """
        store = self.pool_group_of[group]
        slots = self.slots[store]
        missing = count - len(slots.free)
        if missing <= 0:
            pages = self.pages.create(store, group, slots.take(count))
            self._follow_granted(store, pages)
            return pages
        victims = self.eviction[store].pop(missing)
        self.pages.set_state(victims, PageState.LEAVING)
        self._evicted[store].extend(victims)
        self._journal.push((self._unevict, (store, missing)))
        evicted_slots = [self.pages.slot[page] for page in victims]
        pages = self.pages.create(store, group, slots.take(count - missing) + evicted_slots)
        for slot, page in zip(evicted_slots, pages[count - missing :], strict=True):
            self._grant_on(store, slot, page)
        self._follow_granted(store, pages[: count - missing])
        return pages

    def claim(self, group: int, pages: Sequence[int]) -> int:
        """Lock pages for one more user; returns how many of them were cached until now."""
        fresh = self.pages.add_locks(pages)
        self.eviction[self.pool_group_of[group]].add(-fresh)
        return fresh

    def unclaim(self, group: int, pages: Sequence[int]) -> None:
        """Undo a claim of this plan: what is cached again returns to its old place in the order."""
        eviction = self.eviction[self.pool_group_of[group]]
        for page in self.pages.remove_locks(pages):
            eviction.put_back(page)

    def release(self, group: int, pages: Sequence[int], priority: int) -> None:
        """End one user's locks. Committed pages become cached, `pages[0]` the first to go; private ones are freed."""
        store = self.pool_group_of[group]
        state = self.pages.state
        loose = self.pages.remove_locks(pages)
        committed = [page for page in pages if state[page] == _COMMITTED]
        if committed:
            self.eviction[store].push(committed, priority)
        self.eviction[store].add(sum(state[page] == _COMMITTED for page in loose))
        private = [page for page in loose if state[page] == _PRIVATE]
        if private:
            self.free(store, private)

    def free(self, store: int, pages: Sequence[int]) -> None:
        """Return the slots of unlocked pages that are in no tree."""
        self.pages.destroy(pages)
        self.slots[store].give([self.pages.slot[page] for page in pages])

    def untake(self, group: int, pages: Sequence[int]) -> list[int]:
        """Give back pages taken in this plan as if they never had been.

        Returns:
            Pages of other requests whose slot has changed, because theirs belongs to a page that came back.
        """
        store = self.pool_group_of[group]
        returned = list(pages)
        renamed = []
        if self.pages.remove_locks(pages) != returned:
            msg = f"pages {returned} taken in this plan are locked by others"
            raise LogicError(msg)
        while returned and self._evicted[store]:
            owner = self._return_victim(store, returned)
            if owner != NONE:
                renamed.append(owner)
        if returned:
            self.free(store, returned[::-1])
        return renamed

    def commit_page(self, group: int, node: int, page: int) -> None:
        """Make a private page the node's page: immutable, and reusable from now on."""
        self.tree.attach(group, node, page)
        self.pages.set_state((page,), PageState.COMMITTED)
        self.pages.node[page] = node
        self._journal.push((self.pages.node.__setitem__, (page, NONE)))

    def publish(self) -> None:
        """Take evicted pages out of the tree. Journaled, so that even a bug in here can be undone."""
        for evicted in self._evicted:
            for page in evicted:
                self.tree.detach(self.pages.group[page], self.pages.node[page])
            if evicted:
                self.pages.destroy(evicted)

    def forget(self) -> None:
        """The transaction is over and kept."""
        self.pages.publish()
        for evicted, granted_on in zip(self._evicted, self._granted_on, strict=True):
            evicted.clear()
            granted_on.clear()

    def settle(self) -> None:
        """Tidy the eviction order; between transactions only."""
        for eviction in self.eviction:
            eviction.settle()

    def counts(self, tier: int) -> tuple[int, int, int]:
        """Slots in all, free, and cached, of every pool group of the tier at this place."""
        stores = range(tier * self.num_pool_groups, (tier + 1) * self.num_pool_groups)
        total = sum(self.slots[store].num_slots for store in stores)
        free = sum(len(self.slots[store].free) for store in stores)
        return total, free, sum(self.eviction[store].evictable for store in stores)

    @property
    def num_leaving(self) -> int:
        """Pages planned to be dropped."""
        return sum(map(len, self._evicted))

    def _return_victim(self, store: int, returned: list[int]) -> int:
        """Bring the last evicted page back and let one of `returned` go; returns the page moved aside or NONE."""
        victim = self._evicted[store].pop()
        self._journal.push((self._evicted[store].append, (victim,)))
        home = self.pages.slot[victim]
        owner = self._granted_on[store][home]
        moved = NONE
        if owner in returned:
            returned.remove(owner)
            self.pages.destroy((owner,))
        else:
            spent = returned.pop()
            slot = self.pages.slot[spent]
            self.pages.destroy((spent,))
            if self.pages.state[owner] == _PRIVATE and self.pages.slot[owner] == home:
                self.pages.set_slot(owner, slot)
                self._grant_on(store, slot, owner)
                moved = owner
            else:  # freed again within this plan
                self.slots[store].take_exactly(home)
                self.slots[store].give((slot,))
        self.pages.set_state((victim,), PageState.COMMITTED)
        self.eviction[store].put_back(victim)
        return moved

    def _follow_granted(self, store: int, pages: Sequence[int]) -> None:
        """An evicted page's slot may be freed and taken again within one plan."""
        granted_on = self._granted_on[store]
        if granted_on:
            for page in pages:
                if self.pages.slot[page] in granted_on:
                    self._grant_on(store, self.pages.slot[page], page)

    def _grant_on(self, store: int, slot: int, page: int) -> None:
        granted_on = self._granted_on[store]
        old = granted_on.get(slot)
        granted_on[slot] = page
        self._journal.push((self._ungrant_on, (store, slot, old)))

    def _ungrant_on(self, store: int, slot: int, old: int | None) -> None:
        if old is None:
            del self._granted_on[store][slot]
        else:
            self._granted_on[store][slot] = old

    def _unevict(self, store: int, count: int) -> None:
        del self._evicted[store][-count:]
