"""`BlockTables`: one request's device slots per block, as the engine reads them, without a copy.

Entries beyond the request's blocks mean nothing, so that growing needs no inverse; whoever shortens the request first
has them kept for an undo (`keep`).
"""

from array import array
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from manager.page import NONE, PageTable
from manager.storage.journal import Journal

_SPARE_BLOCKS = 16
_LEAST_BLOCKS = 64
_MANY = 128


class BlockTables:
    """Per layer group, a growing buffer [num_blocks] int32; NONE where a page left the window."""

    __slots__ = ("_journal", "_num_groups", "_pages", "_size", "_tables", "_views")

    def __init__(self, num_layer_groups: int, pages: PageTable, journal: Journal) -> None:
        """Empty; the first blocks decide how large the first buffers are."""
        self._pages = pages
        self._journal = journal
        self._num_groups = num_layer_groups
        self._size = 0
        self._tables: list[npt.NDArray[np.int32]] = []
        self._views: list[npt.NDArray[np.int32]] = []

    def view(self, group: int, num_blocks: int) -> npt.NDArray[np.int32]:
        """[num_blocks] int32, read-only; a view of the buffer, good until the buffer grows."""
        if not num_blocks:
            return np.empty(0, np.int32)
        if not self._views:
            self._views = [table.view() for table in self._tables]
            for view in self._views:
                view.flags.writeable = False
        return self._views[group][:num_blocks]

    def write(self, group: int, first: int, pages: Sequence[int]) -> None:
        """Fill in the slots of the blocks from `first` on."""
        if not pages:
            return
        last = first + len(pages)
        if last > self._size:
            self._extend(max(last + _SPARE_BLOCKS, 2 * self._size, _LEAST_BLOCKS))
        slot = self._pages.slot
        if len(pages) == 1:
            self._tables[group][first] = NONE if pages[0] == NONE else slot[pages[0]]
            return
        if len(pages) > _MANY and NONE not in pages:
            # The view of the records' slots must be gone before they grow again.
            self._tables[group][first:last] = np.frombuffer(slot, np.int32)[np.array(pages, np.int32)]
            return
        if NONE in pages:
            slots = [NONE if page == NONE else slot[page] for page in pages]
        else:
            slots = [slot[page] for page in pages]
        self._tables[group][first:last] = np.frombuffer(array("i", slots), np.int32)  # faster than from a list

    def write_entry(self, group: int, block: int, page: int) -> None:
        """Change the slot of one block; journaled."""
        table = self._tables[group]
        self._journal.push((self._put_entry, (group, block, int(table[block]))))
        table[block] = NONE if page == NONE else self._pages.slot[page]

    def keep(self, first: int, last: int) -> None:
        """Have an undo restore the entries of blocks [first, last)."""
        old = [table[first:last].copy() for table in self._tables]
        self._journal.push((self._put, (first, old)))

    def _put_entry(self, group: int, block: int, slot: int) -> None:
        self._tables[group][block] = slot

    def _put(self, first: int, old: Sequence[npt.NDArray[np.int32]]) -> None:
        # `old` is empty where the tables did not exist yet: then there is nothing to restore.
        for table, entries in zip(self._tables, old, strict=False):
            table[first : first + len(entries)] = entries

    def _extend(self, num_blocks: int) -> None:
        old = self._tables
        self._tables = [np.empty(num_blocks, np.int32) for _ in range(self._num_groups)]
        for table, before in zip(self._tables, old, strict=False):
            table[: len(before)] = before
        self._views = []
        self._size = num_blocks
