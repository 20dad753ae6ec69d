"""`PageTable`: one record per page, as parallel arrays.

A record is a small integer, private to `manager`. It stays with the page's data when the page moves
between slots and tiers, so that caches, tree and leases need not follow moves. Arrays instead of objects:
a million cached pages would otherwise cost the collector and the memory several times as much.

    FREE ──create──► PRIVATE ──commit──► COMMITTED ──evict──► LEAVING ──publish──► FREE
                        └──quarantine──► QUARANTINED ──release──► FREE

`locks` counts active caches, leases and pending copies: a locked page is neither moved nor dropped.
A COMMITTED page without locks is cached. LEAVING exists inside a plan only: the page's slot was granted
on, but until publish the page can come back, since nothing has been written over it yet.
"""

from array import array
from collections.abc import Sequence
from enum import IntEnum

from manager.storage.journal import Journal

NONE = -1
"""No record, node, lane or position."""


class PageState(IntEnum):
    """What a page's slot may be used for (I1)."""

    FREE = 0
    STAGED = 1
    PRIVATE = 2
    COMMITTED = 3
    QUARANTINED = 4
    LEAVING = 5


_FREE = int(PageState.FREE)
_PRIVATE = int(PageState.PRIVATE)
_GROWTH = 256


class PageTable:
    """Records of all pages of all stores.

    Attributes:
        slot: the page's place in its store.
        store: number of the store (tier and pool group) that holds it.
        group: layer group whose data it is.
        state: `PageState`.
        locks: users that need it where it is.
        node: tree node of a committed page.
        lane: eviction lane of its last release.
        position: its place in that lane.
    """

    __slots__ = (
        "_journal",
        "_limbo",
        "_spare",
        "group",
        "lane",
        "locks",
        "node",
        "position",
        "slot",
        "state",
        "store",
    )

    def __init__(self, journal: Journal) -> None:
        """Start without records; they are made as needed and reused."""
        self._journal = journal
        self.slot = array("i")
        self.store = bytearray()
        self.group = bytearray()
        self.state = bytearray()
        self.locks = array("i")
        self.node = array("i")
        self.lane = array("h")
        self.position = array("q")
        self._spare: list[int] = []
        # Records freed in this transaction keep their values until publish, so that undoing needs no copy.
        self._limbo: list[int] = []

    def __len__(self) -> int:
        return len(self.slot)

    def create(self, store: int, group: int, slots: Sequence[int]) -> list[int]:
        """Make a private page, locked once, in each of `slots`."""
        count = len(slots)
        if not count:
            return []
        if len(self._spare) < count:
            self._extend(max(count, _GROWTH))
        pages = self._spare[-count:]
        del self._spare[-count:]
        page_slot, page_store, page_group, state, locks = self.slot, self.store, self.group, self.state, self.locks
        for page, slot in zip(pages, slots, strict=True):
            page_slot[page] = slot
            page_store[page] = store
            page_group[page] = group
            state[page] = _PRIVATE
            locks[page] = 1
        self._journal.push((self._uncreate, (pages,)))
        return pages

    def destroy(self, pages: Sequence[int]) -> None:
        """End unlocked pages that are in no tree. Their slots are the caller's to give back."""
        state = self.state
        old = [state[page] for page in pages]
        for page in pages:
            state[page] = _FREE
        self._limbo.extend(pages)
        self._journal.push((self._undestroy, (pages, old)))

    def set_state(self, pages: Sequence[int], state: PageState) -> None:
        """Change the state of pages that all have the same one."""
        if pages:
            old = self.state[pages[0]]
            self._put_state(pages, int(state))
            self._journal.push((self._put_state, (pages, old)))

    def set_place(self, page: int, store: int, slot: int) -> None:
        """Bind a page to another slot, of any store."""
        self._journal.push((self._put_place, (page, self.store[page], self.slot[page])))
        self._put_place(page, store, slot)

    def add_locks(self, pages: Sequence[int]) -> int:
        """Lock pages once more; returns how many had no lock before."""
        locks = self.locks
        fresh = 0
        for page in pages:
            count = locks[page]
            locks[page] = count + 1
            if not count:
                fresh += 1
        self._journal.push((self._drop_locks, (pages,)))
        return fresh

    def remove_locks(self, pages: Sequence[int]) -> list[int]:
        """Take one lock from each; returns the pages that have none left, in order."""
        locks = self.locks
        loose = []
        for page in pages:
            count = locks[page] - 1
            locks[page] = count
            if not count:
                loose.append(page)
        self._journal.push((self._put_locks, (pages,)))
        return loose

    def publish(self) -> None:
        """Records freed in this transaction may be used again."""
        for page in self._limbo:
            self.node[page] = NONE
            self.lane[page] = NONE
            self.position[page] = NONE
        self._spare.extend(self._limbo)
        self._limbo.clear()

    def live(self) -> list[int]:
        """Every record that is not free; for audits."""
        return [page for page, state in enumerate(self.state) if state != _FREE]

    def _extend(self, count: int) -> None:
        first = len(self.slot)
        self.slot.extend([0] * count)
        self.store.extend(bytes(count))
        self.group.extend(bytes(count))
        self.state.extend(bytes(count))
        self.locks.extend([0] * count)
        self.node.extend([NONE] * count)
        self.lane.extend([NONE] * count)
        self.position.extend([NONE] * count)
        self._spare[:0] = range(first + count - 1, first - 1, -1)

    def _uncreate(self, pages: Sequence[int]) -> None:
        for page in pages:
            self.state[page] = _FREE
            self.locks[page] = 0
        self._spare.extend(pages)

    def _undestroy(self, pages: Sequence[int], states: Sequence[int]) -> None:
        for page, state in zip(pages, states, strict=True):
            self.state[page] = state
        if pages:
            del self._limbo[-len(pages) :]

    def _put_place(self, page: int, store: int, slot: int) -> None:
        self.store[page] = store
        self.slot[page] = slot

    def _put_state(self, pages: Sequence[int], state: int) -> None:
        for page in pages:
            self.state[page] = state

    def _drop_locks(self, pages: Sequence[int]) -> None:
        for page in pages:
            self.locks[page] -= 1

    def _put_locks(self, pages: Sequence[int]) -> None:
        for page in pages:
            self.locks[page] += 1
