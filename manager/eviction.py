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

from manager.errors import OutOfPagesError
from manager.page import NONE, PageState, PageTable
from manager.storage.journal import Journal
from manager.storage.slots import SlotAllocator

_COMMITTED = int(PageState.COMMITTED)
_FREE = int(PageState.FREE)
_COMPACT_SLACK = 1024


class Lane:
    """Releases at one priority in one store.

    Attributes:
        number: unique among all lanes of the manager, written to `PageTable.lane`.
        priority: of the requests that released into it.
        log: page records in order of release.
        base: position of `log[0]`.
        cursor: position from which valid entries begin.
    """

    __slots__ = ("base", "cursor", "log", "number", "priority")

    def __init__(self, number: int, priority: int) -> None:
        """Start empty."""
        self.number = number
        self.priority = priority
        self.log = array("i")
        self.base = 0
        self.cursor = 0

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
        numbers, positions = self._pages.lane, self._pages.position
        old = [(page, numbers[page], positions[page]) for page in pages]
        for page, number, _ in old:
            # The old lane may be another store's: the page has moved since.
            kept = priority if number == NONE else max(priority, self._registry[number].priority)
            lane = self._by_priority.get(kept) or self._lane(kept)
            numbers[page] = lane.number
            positions[page] = lane.base + len(lane.log)
            lane.log.append(page)
        self._journal.push((self._unpush, (old,)))

    def add(self, count: int) -> None:
        """Change the number of cached pages; negative for claims."""
        if count:
            self._add(count)
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
        lane = self._registry[self._pages.lane[page]]
        position = self._pages.position[page]
        if position < lane.cursor:
            self._journal.push((self._put_cursor, (lane, lane.cursor)))
            lane.cursor = position
        self.add(1)

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
        return self._registry[self._pages.lane[page]].priority

    def priorities(self) -> Iterator[tuple[int, list[int]]]:
        """Cached pages per priority, in order; for snapshots."""
        for lane in self._lanes:
            span = range(lane.cursor, lane.base + len(lane.log))
            yield lane.priority, [lane.log[at - lane.base] for at in span if self._is_valid(lane, at)]

    def _is_valid(self, lane: Lane, position: int) -> bool:
        pages = self._pages
        page = lane.log[position - lane.base]
        return (
            pages.position[page] == position
            and pages.lane[page] == lane.number
            and not pages.locks[page]
            and pages.state[page] == _COMMITTED
        )

    def _collect(self, lane: Lane, count: int, victims: list[int]) -> int:
        """Append up to `count` victims of one lane; returns where its cursor belongs then."""
        pages = self._pages
        positions, numbers, locks, states = pages.position, pages.lane, pages.locks, pages.state
        log, base, number = lane.log, lane.base, lane.number
        position, end = lane.cursor, lane.base + len(lane.log)
        while position < end and count:
            page = log[position - base]
            if (
                positions[page] == position
                and numbers[page] == number
                and not locks[page]
                and states[page] == _COMMITTED
            ):
                victims.append(page)
                count -= 1
            position += 1
        return position

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
        span = range(lane.cursor, lane.base + len(lane.log))
        kept = array("i", [lane.log[at - lane.base] for at in span if self._is_valid(lane, at)])
        lane.log = kept
        lane.base = lane.cursor = 0
        for position, page in enumerate(kept):
            self._pages.position[page] = position

    def _unpush(self, old: Sequence[tuple[int, int, int]]) -> None:
        for page, number, position in reversed(old):
            self._registry[self._pages.lane[page]].log.pop()
            self._pages.lane[page] = number
            self._pages.position[page] = position

    def _add(self, count: int) -> None:
        self.evictable += count

    def _put_cursor(self, lane: Lane, cursor: int) -> None:
        lane.cursor = cursor


class PlannedEvictions:
    """Pages that the open transaction takes out of their stores, and what became of their slots.

    Until publish a victim is LEAVING and keeps its record and place. It is dropped then, or, with a
    destination, becomes a cached page of a lower tier.
    """

    __slots__ = ("_controllers", "_granted_on", "_journal", "_pages", "_slots", "destinations", "evicted")

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
        # Device slots that were taken from victims, and the page that has each now.
        self._granted_on: list[dict[int, int]] = [{} for _ in slots]

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

    def note_taken(self, store: int, slots: Sequence[int], pages: Sequence[int], *, num_evicted: int) -> None:
        """`pages` took `slots`, the last `num_evicted` of them from victims."""
        granted_on = self._granted_on[store]
        fresh = len(slots) - num_evicted
        for place, (slot, page) in enumerate(zip(slots, pages, strict=True)):
            if place >= fresh or slot in granted_on:
                self._grant_on(store, slot, page)

    def give_back(self, store: int, slots: Sequence[int]) -> list[int]:
        """Return slots taken in this plan as if they never had been: the last victims come back.

        Returns:
            Pages whose slot has changed, because theirs belongs to a victim that came back.
        """
        returned, moved = list(slots), []
        while returned and self.evicted[store]:
            owner = self._restore_last(store, returned)
            if owner != NONE:
                moved.append(owner)
        self._slots[store].give(returned[::-1])
        return moved

    def clear(self) -> None:
        """The transaction is over."""
        for evicted, granted_on in zip(self.evicted, self._granted_on, strict=True):
            evicted.clear()
            granted_on.clear()
        self.destinations.clear()

    def _restore_last(self, store: int, returned: list[int]) -> int:
        """Bring the last victim back for one of the `returned` slots; returns the page moved aside, or NONE."""
        victim = self.evicted[store].pop()
        self._journal.push((self.evicted[store].append, (victim,)))
        home, moved = self._pages.slot[victim], NONE
        if home in returned:
            returned.remove(home)
        else:
            owner, slot = self._granted_on[store][home], returned.pop()
            state, place = self._pages.state[owner], (self._pages.store[owner], self._pages.slot[owner])
            if state != _FREE and place == (store, home):
                self._pages.set_place(owner, store, slot)
                self._grant_on(store, slot, owner)
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

    def _grant_on(self, store: int, slot: int, page: int) -> None:
        granted_on = self._granted_on[store]
        self._journal.push((self._ungrant_on, (store, slot, granted_on.get(slot))))
        granted_on[slot] = page

    def _ungrant_on(self, store: int, slot: int, old: int | None) -> None:
        if old is None:
            del self._granted_on[store][slot]
        else:
            self._granted_on[store][slot] = old

    def _unevict(self, store: int, count: int) -> None:
        del self.evicted[store][-count:]

    def _unsend(self, page: int) -> None:
        del self.destinations[page]
