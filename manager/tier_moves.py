"""`TierMoves`: pages on their way between tiers, within one transaction.

    device  --evict: demote, or drop where no lower slot is free-->  host  --trim-->  disk  --trim-->  gone
    device  <--claim or resume: promote-------------------------------  host, disk
    device  --suspend: move down what no active cache needs---------->  host, then disk

Slots of lower tiers that this transaction frees can be taken from the next one on (M3), hence the headroom that
`trim` keeps free: without it a host tier full of cached pages would refuse every suspension.
"""

from collections.abc import Sequence

from manager.eviction import EvictionController, PlannedEvictions
from manager.page import NONE, PageState, PageTable
from manager.pools.base import SlotCopy
from manager.storage.copies import CopyQueue
from manager.storage.journal import Journal
from manager.storage.slots import SlotAllocator

_COMMITTED = int(PageState.COMMITTED)
_HEADROOM_SHARE = 8
"""One slot in so many is kept free in lower tiers."""


class TierMoves:
    """Takes device slots, and moves pages up and down.

    Attributes:
        evictions: what leaves in the open transaction.
        copies: what the open transaction copies.
        holds: per page, how many of its locks are suspended caches'; pages without any are absent.
        pins: per page, locks that keep it where it is until its copies of this transaction have been started.
        broken_tiers: tiers that failed to take a copy; nothing is moved into them any more.
    """

    __slots__ = (
        "_controllers",
        "_journal",
        "_num_pool_groups",
        "_pages",
        "_slots",
        "broken_tiers",
        "copies",
        "evictions",
        "holds",
        "pins",
    )

    def __init__(
        self,
        pages: PageTable,
        slots: Sequence[SlotAllocator],
        controllers: Sequence[EvictionController],
        num_pool_groups: int,
        journal: Journal,
    ) -> None:
        """Nothing moves yet; `slots` and `controllers` by store."""
        self._pages = pages
        self._slots = slots
        self._controllers = controllers
        self._num_pool_groups = num_pool_groups
        self._journal = journal
        self.evictions = PlannedEvictions(pages, slots, controllers, journal)
        self.copies = CopyQueue(journal)
        self.holds: dict[int, int] = {}
        self.pins: dict[int, int] = {}
        self.broken_tiers: set[int] = set()

    def lower_room(self, pool_group: int) -> int:
        """Slots below the device that a suspension could take now."""
        return sum(len(self._slots[store].free) for store in self._lower_stores(pool_group))

    def is_on_device(self, page: int) -> bool:
        """Whether the engine can read it."""
        return self._pages.store[page] < self._num_pool_groups

    def _lower_stores(self, pool_group: int) -> list[int]:
        stores = range(pool_group + self._num_pool_groups, len(self._slots), self._num_pool_groups)
        return [store for store in stores if store // self._num_pool_groups not in self.broken_tiers]

    def take_slots(self, store: int, count: int) -> list[int]:
        """Device slots, the last of them evicted where too few are free."""
        slots = self._slots[store]
        missing = count - len(slots.free)
        if missing <= 0:
            return slots.take(count)
        victims = self.evictions.evict(store, missing)
        if len(self._slots) > self._num_pool_groups:
            self._send_down(store, victims)
        return slots.take(count - missing) + [self._pages.slot[page] for page in victims]

    def _send_down(self, store: int, victims: Sequence[int]) -> None:
        """Give victims a destination in the next lower tiers that have free slots; the rest is dropped."""
        targets = [lower for lower in self._lower_stores(store % self._num_pool_groups) if lower > store]
        for page in victims:
            target = next((lower for lower in targets if self._slots[lower].free), NONE)
            if target == NONE:
                return
            self.evictions.send(page, target, self._slots[target].take(1)[0])

    def promote(self, store: int, pages: Sequence[int]) -> None:
        """Give locked pages of lower tiers places on the device; their data follows by fill."""
        if not pages:
            return
        slots = self.take_slots(store, len(pages))
        for page, slot in zip(pages, slots, strict=True):
            self.copies.add_fill(page, self._pages.store[page], self._pages.slot[page])
            self.copies.free_later(self._pages.store[page], self._pages.slot[page])
            self._pages.set_place(page, store, slot)
            self.pin(page)
        self.evictions.note_taken(store, slots, pages)

    def unpromote(self, store: int, pages: Sequence[int]) -> list[int]:
        """Pages whose fill has not run yet go back to where their data is; returns renamed pages."""
        slots = []
        for page in pages:
            slots.append(self._pages.slot[page])
            self._return_to_source(page)
        return self.evictions.give_back(store, slots) if slots else []

    def _return_to_source(self, page: int) -> None:
        fill = self.copies.cancel_fill(page)
        self.copies.keep_after_all(fill.source_store, fill.source_slot)
        self._pages.set_place(page, fill.source_store, fill.source_slot)
        self.unpin(page)

    def pin(self, page: int) -> int:
        """Keep a page where it is until publish; returns 1 when it left the cached ones by that."""
        fresh = self._pages.add_locks((page,))
        self._controllers[self._pages.store[page]].add(-fresh)
        self._put_pin(page, self.pins.get(page, 0) + 1)
        self._journal.push((self._put_pin, (page, self.pins[page] - 1)))
        return fresh

    def unpin(self, page: int) -> bool:
        """Take a pin away, as if it had never been; returns whether nobody needs the page any more."""
        self._journal.push((self._put_pin, (page, self.pins[page])))
        self._put_pin(page, self.pins[page] - 1)
        return not self._pages.remove_locks((page,))

    def needs_only_suspended(self, page: int) -> bool:
        """Whether suspended caches are its only users, but for its own promotion in this plan."""
        users = self._pages.locks[page] - (page in self.copies.fills)
        return users > 0 and users == self.holds.get(page, 0)

    def move_down_held(self, pages: Sequence[int]) -> list[int]:
        """Move pages that only suspended caches need, as far as there is room."""
        moved = []
        for page in pages:
            if not self.needs_only_suspended(page) or not self.is_on_device(page):
                continue
            store, slot = self._pages.store[page], self._pages.slot[page]
            if page in self.copies.fills:
                self._return_to_source(page)
            else:
                target = next((lower for lower in self._lower_stores(store) if self._slots[lower].free), NONE)
                if target == NONE:
                    break
                target_slot = self._slots[target].take(1)[0]
                self.copies.add_stage(SlotCopy(*self._content(page), target, target_slot))
                if page in self.copies.clones:
                    self.drop_clone(page)
                self._pages.set_place(page, target, target_slot)
            self._slots[store].give((slot,))
            moved.append(page)
        return moved

    def trim(self) -> None:
        """Keep some slots of every lower tier free, by demoting or dropping its oldest cached pages."""
        for store in range(len(self._slots) - 1, self._num_pool_groups - 1, -1):
            headroom = max(1, self._slots[store].num_slots // _HEADROOM_SHARE)
            short = min(headroom - len(self._slots[store].free), self._controllers[store].evictable)
            if short > 0:
                self._send_down(store, self.evictions.evict(store, short))

    def staged(self) -> list[SlotCopy]:
        """Copies to make before publish: out of the lowest tiers first.

        A page that a suspension moved down in this transaction, and an eviction further down, is copied from where its
        content is: its place between the two holds nothing yet when the lowest tiers are copied.
        """
        pages = self._pages
        origin = {(copy.target_store, copy.target_slot): copy[:2] for copy in self.copies.stages}
        sent = []
        for page, target in self.evictions.destinations.items():
            source = (pages.store[page], pages.slot[page])
            sent.append(SlotCopy(*origin.pop(source, source), *target))
        stages = [copy for copy in self.copies.stages if (copy.target_store, copy.target_slot) in origin]
        return sorted([*stages, *sent], key=lambda copy: -(copy.source_store // self._num_pool_groups))

    def break_tier(self, store: int) -> None:
        """Its tier takes no pages any more; what it has can still be read."""
        self.broken_tiers.add(store // self._num_pool_groups)

    def add_hold(self, page: int, count: int) -> None:
        """Change how many of the page's locks are suspended caches'."""
        self._put_hold(page, self.holds.get(page, 0) + count)
        self._journal.push((self._put_hold, (page, self.holds.get(page, 0) - count)))

    def drop_clone(self, page: int) -> None:
        """A new page that should have started as a copy is not wanted any more, or copied from its source elsewhere."""
        source = self.copies.cancel_clone(page)
        if not self.unpin(source):
            return
        store = self._pages.store[source]
        if self._pages.state[source] == _COMMITTED:
            self._controllers[store].put_back(source)
        else:  # the fork's source has ended in this plan
            self._pages.destroy((source,))
            self._slots[store].give((self._pages.slot[source],))

    def _content(self, page: int) -> tuple[int, int]:
        """Store and slot where the page's content is before the fills of this transaction."""
        source = self.copies.clones.get(page, page)
        fill = self.copies.fills.get(source)
        if fill is not None:
            return fill.source_store, fill.source_slot
        return self._pages.store[source], self._pages.slot[source]

    def _put_pin(self, page: int, count: int) -> None:
        if count:
            self.pins[page] = count
        else:
            self.pins.pop(page, None)

    def _put_hold(self, page: int, count: int) -> None:
        if count:
            self.holds[page] = count
        else:
            self.holds.pop(page, None)
