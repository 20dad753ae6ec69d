"""`EvictionController`: in which order cached pages of one store are given up.

Least recently released first, lowest priority first. Each priority has a *lane*, an append-only log of
releases; a page's valid entry is the one at its `position`, and it counts only while the page is cached:

    lane   [ p7 | p2 | p9 | p2 | ... ]        p2 was released twice: only the later entry is valid
             ▲ cursor: everything before it was evicted, claimed, or released again

Claiming a page touches nothing here but a count: its entry becomes valid again when the claim is
undone, at its old place. Unlinking it would cost more on every claim, and its old neighbours may have gone.

Differs from a linked list (vLLM's free block queue) in that: claims and their undoing are free, evictions move
one cursor, and the price is a rare compaction between transactions.
"""

from array import array
from bisect import insort
from collections.abc import Iterator, Sequence

import numpy as np

from manager.errors import OutOfPagesError
from manager.page import NONE, PageState, PageTable
from manager.storage.journal import Journal
from manager.storage.slots import SlotAllocator

_COMMITTED = int(PageState.COMMITTED)
_FREE = int(PageState.FREE)
_COMPACT_SLACK = 1024
_LANE_SHIFT = 40


class Lane:
    """Releases at one priority in one store.

    Attributes:
        number: unique among all lanes of the manager; the upper bits of its positions, so that they are, too.
        priority: of the requests that released into it.
        log: page records in order of release.
        first: the lane's lowest position.
        base: position of `log[0]`.
        cursor: position from which valid entries begin.
    """

    __slots__ = ("base", "cursor", "first", "log", "number", "priority")

    def __init__(self, number: int, priority: int) -> None:
        """Start empty."""
        self.number = number
        self.priority = priority
        self.log = array("i")
        self.base = self.first = number << _LANE_SHIFT
        self.cursor = self.base

    def __lt__(self, other: "Lane") -> bool:
        return self.priority < other.priority


class EvictionController:
    """The cached pages of one store, in the order in which they would be evicted.

    Attributes:
        evictable: pages that are cached now.
    """

    __slots__ = ("_by_priority", "_journal", "_lanes", "_pages", "_registry", "evictable")

    def __init__(self, pages: PageTable, registry: list[Lane], journal: Journal) -> None:
        """`registry` is shared by all stores; a lane's number is its place in it."""
        self._pages = pages
        self._registry = registry
        self._journal = journal
        self._lanes: list[Lane] = []
        self._by_priority: dict[int, Lane] = {}
        self.evictable = 0

    def push(self, pages: Sequence[int], priority: int) -> None:
        """Note a release of committed pages, in order; a page keeps the highest priority it ever had.

        Also for pages that somebody still locks: should that turn out to be a claim that is undone, then
        this is the page's place. `evictable` is the caller's to change, through `add`.
        """
        positions = self._pages.position
        lane = self._by_priority.get(priority) or self._lane(priority)
        old = [positions[page] for page in pages]
        self._journal.push((self._unpush, (pages, old)))
        at = lane.base + len(lane.log)
        # Never released before, or, for want of another lane, into this one.
        if max(old) == NONE or len(self._registry) == 1:
            lane.log.extend(pages)
            for page in pages:
                positions[page] = at
                at += 1
            return
        number = lane.number
        for page, before in zip(pages, old, strict=True):
            if before == NONE or before >> _LANE_SHIFT == number:
                positions[page] = at
                lane.log.append(page)
                at += 1
            elif self._push_elsewhere(page, before >> _LANE_SHIFT, priority):
                at += 1

    def add(self, count: int) -> None:
        """Change the number of cached pages; negative for claims."""
        if count:
            self.evictable += count
            self._journal.push((self._add, (-count,)))

    def pop(self, count: int) -> list[int]:
        """Choose the next `count` victims; they leave the count of cached pages.

        Raises:
            OutOfPagesError: fewer are cached; nothing changed.
        """
        if count > self.evictable:
            msg = f"{count} cached pages wanted, {self.evictable} evictable"
            raise OutOfPagesError(msg)
        victims: list[int] = []
        for lane in self._lanes:
            if len(victims) == count:
                break
            cursor = self._collect(lane, count - len(victims), victims)
            self._journal.push((self._put_cursor, (lane, lane.cursor)))
            lane.cursor = cursor
        self.add(-len(victims))
        return victims

    def put_back(self, page: int) -> None:
        """A page is cached again at its old place: its claim or eviction was undone."""
        position = self._pages.position[page]
        lane = self._registry[position >> _LANE_SHIFT]
        if position < lane.cursor:
            self._journal.push((self._put_cursor, (lane, lane.cursor)))
            lane.cursor = position
        self.add(1)

    def was_released_here(self, page: int) -> bool:
        """Whether the page's last release was into this store."""
        lane = self._registry[self._pages.position[page] >> _LANE_SHIFT]
        return self._by_priority.get(lane.priority) is lane

    def settle(self) -> None:
        """Between transactions: skip entries that can never be valid again, and compact where they abound."""
        for lane in self._lanes:
            if len(lane.log) > 2 * self.evictable + _COMPACT_SLACK:
                self._compact(lane)
                continue
            end = lane.base + len(lane.log)
            while lane.cursor < end and not self._is_valid(lane, lane.cursor):
                lane.cursor += 1

    def order(self) -> Iterator[int]:
        """Cached pages, next victim first."""
        for lane in self._lanes:
            for position in range(lane.cursor, lane.base + len(lane.log)):
                if self._is_valid(lane, position):
                    yield lane.log[position - lane.base]

    def priority_of(self, page: int) -> int:
        """The highest priority at which the page was ever released."""
        return self._registry[self._pages.position[page] >> _LANE_SHIFT].priority

    def priorities(self) -> Iterator[tuple[int, list[int]]]:
        """Cached pages per priority, in order; for snapshots."""
        for lane in self._lanes:
            span = range(lane.cursor, lane.base + len(lane.log))
            yield lane.priority, [lane.log[at - lane.base] for at in span if self._is_valid(lane, at)]

    def _is_valid(self, lane: Lane, position: int) -> bool:
        pages = self._pages
        page = lane.log[position - lane.base]
        return pages.position[page] == position and not pages.locks[page] and pages.state[page] == _COMMITTED

    def _collect(self, lane: Lane, count: int, victims: list[int]) -> int:
        """Append up to `count` victims of one lane; returns where its cursor belongs then."""
        pages = self._pages
        positions, locks, states = pages.position, pages.locks, pages.state
        position, end, wanted = lane.cursor, lane.base + len(lane.log), len(victims) + count
        while position < end and len(victims) < wanted:
            start = position - lane.base
            chunk = lane.log[start : start + wanted - len(victims)]
            victims += [
                page
                for at, page in enumerate(chunk, position)
                if positions[page] == at and not locks[page] and states[page] == _COMMITTED
            ]
            position += len(chunk)
        return position

    def _push_elsewhere(self, page: int, number: int, priority: int) -> bool:
        """Push a page that has another lane: of another store, or of a higher priority, which it keeps.

        Returns:
            Whether it went to the lane of `priority` after all.
        """
        kept = max(priority, self._registry[number].priority)
        lane = self._by_priority.get(kept) or self._lane(kept)
        self._pages.position[page] = lane.base + len(lane.log)
        lane.log.append(page)
        return kept == priority

    def _lane(self, priority: int) -> Lane:
        lane = self._by_priority.get(priority)
        if lane is None:
            # Not journaled: an empty lane is no state.
            lane = Lane(len(self._registry), priority)
            self._registry.append(lane)
            self._by_priority[priority] = lane
            insort(self._lanes, lane)
        return lane

    def _compact(self, lane: Lane) -> None:
        # In numpy: a million entries may pile up between two compactions.
        pages = self._pages
        log = np.frombuffer(lane.log, np.int32)[lane.cursor - lane.base :]
        positions = np.frombuffer(pages.position, np.int64)
        valid = positions[log] == np.arange(lane.cursor, lane.base + len(lane.log))
        valid &= np.frombuffer(pages.locks, np.int32)[log] == 0
        valid &= np.frombuffer(pages.state, np.uint8)[log] == _COMMITTED
        kept = log[valid]
        positions[kept] = np.arange(lane.first, lane.first + len(kept))
        lane.log = array("i", kept.tobytes())
        lane.base = lane.cursor = lane.first

    def _unpush(self, pages: Sequence[int], old: Sequence[int]) -> None:
        positions = self._pages.position
        for page, before in zip(reversed(pages), reversed(old), strict=True):
            self._registry[positions[page] >> _LANE_SHIFT].log.pop()
            positions[page] = before

    def _add(self, count: int) -> None:
        self.evictable += count

    def _put_cursor(self, lane: Lane, cursor: int) -> None:
        lane.cursor = cursor


class PlannedEvictions:
    """Pages that the open transaction takes out of their stores, and what became of their slots.

    Until publish a victim is LEAVING and keeps its record and place. It is dropped then, or, with a
    destination, becomes a cached page of a lower tier.
    """

    __slots__ = ("_controllers", "_journal", "_pages", "_slots", "_taken", "destinations", "evicted")

    def __init__(
        self,
        pages: PageTable,
        slots: Sequence[SlotAllocator],
        controllers: Sequence[EvictionController],
        journal: Journal,
    ) -> None:
        """Nothing is planned; `slots` and `controllers` by store."""
        self._pages = pages
        self._slots = slots
        self._controllers = controllers
        self._journal = journal
        self.evicted: list[list[int]] = [[] for _ in slots]
        self.destinations: dict[int, tuple[int, int]] = {}
        # Per store, what was taken in this plan: slots, and the pages that took them.
        self._taken: list[list[tuple[Sequence[int], Sequence[int]]]] = [[] for _ in slots]

    @property
    def is_empty(self) -> bool:
        """Whether no page is leaving."""
        return not any(self.evicted)

    def evict(self, store: int, count: int) -> list[int]:
        """Choose victims; they are LEAVING from now on.

        Raises:
            OutOfPagesError: fewer are cached; nothing changed.
        """
        victims = self._controllers[store].pop(count)
        self._pages.set_state(victims, PageState.LEAVING)
        self.evicted[store].extend(victims)
        self._journal.push((self._unevict, (store, len(victims))))
        return victims

    def send(self, page: int, store: int, slot: int) -> None:
        """A victim goes to a lower tier instead of being dropped."""
        self.destinations[page] = (store, slot)
        self._journal.push((self._unsend, (page,)))

    def note_taken(self, store: int, slots: Sequence[int], pages: Sequence[int]) -> None:
        """`pages` took `slots` in this plan; whose they are is worked out only where something is given back."""
        self._taken[store].append((slots, pages))
        self._journal.push((self._untake, (store,)))

    def give_back(self, store: int, slots: Sequence[int]) -> list[int]:
        """Return slots taken in this plan as if they never had been: the last victims come back.

        Returns:
            Pages whose slot has changed, because theirs belongs to a victim that came back.
        """
        returned = list(slots)
        moved: list[int] = []
        if not self.evicted[store]:
            self._slots[store].give(returned[::-1])
            return moved
        owners = {slot: page for taken, pages in self._taken[store] for slot, page in zip(taken, pages, strict=True)}
        while returned and self.evicted[store]:
            owner = self._restore_last(store, returned, owners)
            if owner != NONE:
                moved.append(owner)
        self._slots[store].give(returned[::-1])
        return moved

    def clear(self) -> None:
        """The transaction is over."""
        for evicted in self.evicted:
            evicted.clear()
        for taken in self._taken:
            taken.clear()
        self.destinations.clear()

    def _restore_last(self, store: int, returned: list[int], owners: dict[int, int]) -> int:
        """Bring the last victim back for one of the `returned` slots; returns the page moved aside, or NONE."""
        victim = self.evicted[store].pop()
        self._journal.push((self.evicted[store].append, (victim,)))
        home, moved = self._pages.slot[victim], NONE
        if home in returned:
            returned.remove(home)
        else:
            owner, slot = owners[home], returned.pop()
            state, place = self._pages.state[owner], (self._pages.store[owner], self._pages.slot[owner])
            if state != _FREE and place == (store, home):
                self._pages.set_place(owner, store, slot)
                self.note_taken(store, (slot,), (owner,))
                owners[slot] = owner
                moved = owner
            else:  # freed again within this plan
                self._slots[store].take_exactly(home)
                self._slots[store].give((slot,))
        if victim in self.destinations:
            target_store, target_slot = self.destinations.pop(victim)
            self._journal.push((self.destinations.__setitem__, (victim, (target_store, target_slot))))
            self._slots[target_store].give((target_slot,))
        self._pages.set_state((victim,), PageState.COMMITTED)
        self._controllers[store].put_back(victim)
        return moved

    def _untake(self, store: int) -> None:
        self._taken[store].pop()

    def _unevict(self, store: int, count: int) -> None:
        del self.evicted[store][-count:]

    def _unsend(self, page: int) -> None:
        del self.destinations[page]
