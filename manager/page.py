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

import numpy as np

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
_COMMITTED = int(PageState.COMMITTED)
_GROWTH = 256
_MANY = 128
_FEW = 4


def without(pages: Sequence[int], dropped: Sequence[int]) -> list[int]:
    """The pages, in order, but for the `dropped` ones, which are among them."""
    if len(dropped) > _FEW:
        gone = set(dropped)
        return [page for page in pages if page not in gone]
    rest = list(pages)
    for page in dropped:
        rest.remove(page)
    return rest


class PageTable:
    """Records of all pages of all stores.

    Attributes:
        slot: the page's place in its store.
        store: number of the store (tier and pool group) that holds it.
        group: layer group whose data it is.
        state: `PageState`.
        locks: users that need it where it is.
        node: tree node of a committed page.
        position: where it is in the eviction order (`eviction.Lane`), since its last release.
    """

    __slots__ = (
        "_is_uniform",
        "_journal",
        "_limbo",
        "_spare",
        "group",
        "locks",
        "node",
        "position",
        "slot",
        "state",
        "store",
    )

    def __init__(self, journal: Journal, *, is_uniform: bool = False) -> None:
        """Start without records; they are made as needed and reused.

        `is_uniform`: there is one store and one layer group, so that every record has the same.
        """
        self._is_uniform = is_uniform
        self._journal = journal
        self.slot = array("i")
        self.store = bytearray()
        self.group = bytearray()
        self.state = bytearray()
        self.locks = array("i")
        self.node = array("i")
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
        page_slot, state, locks = self.slot, self.state, self.locks
        for page, slot in zip(pages, slots, strict=True):
            page_slot[page] = slot
            state[page] = _PRIVATE
            locks[page] = 1
        if not self._is_uniform:
            for page in pages:
                self.store[page] = store
                self.group[page] = group
        self._journal.push((self._uncreate, (pages,)))
        return pages

    def destroy(self, pages: Sequence[int]) -> None:
        """End unlocked pages of one state that are in no tree. Their slots are the caller's to give back."""
        if pages:
            self._journal.push((self._undestroy, (pages, self.state[pages[0]])))
            self._put_state(pages, _FREE)
            self._limbo.extend(pages)

    def set_state(self, pages: Sequence[int], state: PageState) -> None:
        """Change the state of pages that all have the same one."""
        if pages:
            old = self.state[pages[0]]
            self._put_state(pages, int(state))
            self._journal.push((self._put_state, (pages, old)))

    def commit(self, pages: Sequence[int], nodes: Sequence[int]) -> None:
        """Private pages become the pages of tree nodes."""
        state, page_node = self.state, self.node
        for page, node in zip(pages, nodes, strict=True):
            state[page] = _COMMITTED
            page_node[page] = node
        self._journal.push((self._uncommit, (pages,)))

    def set_place(self, page: int, store: int, slot: int) -> None:
        """Bind a page to another slot, of any store."""
        self._journal.push((self.put_place, (page, self.store[page], self.slot[page])))
        self.put_place(page, store, slot)

    def add_locks(self, pages: Sequence[int]) -> int:
        """Lock different pages once more; returns how many had no lock before."""
        self._journal.push((self._drop_locks, (pages,)))
        if len(pages) > _MANY:
            # The view must be gone before the arrays grow again.
            counts = np.frombuffer(self.locks, np.int32)
            places = np.array(pages, np.int32)
            before = counts[places]
            counts[places] = before + 1
            return len(places) - int(np.count_nonzero(before))
        locks = self.locks
        fresh = 0
        for page in pages:
            count = locks[page]
            locks[page] = count + 1
            if not count:
                fresh += 1
        return fresh

    def remove_locks(self, pages: Sequence[int]) -> list[int]:
        """Take one lock from each; returns the pages that others still lock, in order."""
        locks = self.locks
        kept = []
        for page in pages:
            count = locks[page] - 1
            locks[page] = count
            if count:
                kept.append(page)
        self._journal.push((self._put_locks, (pages,)))
        return kept

    def publish(self) -> None:
        """Records freed in this transaction may be used again."""
        if self._limbo:
            position = self.position
            for page in self._limbo:
                position[page] = NONE
            self._spare.extend(self._limbo)
            self._limbo.clear()

    def live(self) -> list[int]:
        """Every record that is not free; for audits."""
        return [page for page, state in enumerate(self.state) if state != _FREE]

    def _extend(self, count: int) -> None:
        first = len(self.slot)
        zeros, none = array("i", (0,)) * count, array("i", (NONE,)) * count
        self.slot.extend(zeros)
        self.store.extend(bytes(count))
        self.group.extend(bytes(count))
        self.state.extend(bytes(count))
        self.locks.extend(zeros)
        self.node.extend(none)
        self.position.extend(array("q", (NONE,)) * count)
        self._spare[:0] = range(first + count - 1, first - 1, -1)

    def _uncreate(self, pages: Sequence[int]) -> None:
        for page in pages:
            self.state[page] = _FREE
            self.locks[page] = 0
        self._spare.extend(pages)

    def _undestroy(self, pages: Sequence[int], state: int) -> None:
        self._put_state(pages, state)
        del self._limbo[-len(pages) :]

    def _uncommit(self, pages: Sequence[int]) -> None:
        for page in pages:
            self.state[page] = _PRIVATE
            self.node[page] = NONE

    def put_place(self, page: int, store: int, slot: int) -> None:
        """The inverse of `set_place`; in a journal, it names a page that has moved."""
        self.store[page] = store
        self.slot[page] = slot

    def _put_state(self, pages: Sequence[int], state: int) -> None:
        states = self.state
        for page in pages:
            states[page] = state

    def _drop_locks(self, pages: Sequence[int]) -> None:
        locks = self.locks
        for page in pages:
            locks[page] -= 1

    def _put_locks(self, pages: Sequence[int]) -> None:
        for page in pages:
            self.locks[page] += 1
