"""`BlockTables`: one request's device slots per block, as the engine reads them, without a copy.

Entries beyond the request's blocks mean nothing, so that growing needs no inverse; whoever shortens the request first
has them kept for an undo (`keep`).
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from manager.page import NONE, PageTable
from manager.storage.journal import Journal

_FIRST_BLOCKS = 16


class BlockTables:
    """Per layer group, a growing buffer [num_blocks] int32; NONE where a page left the window."""

    __slots__ = ("_journal", "_pages", "_tables", "_views")

    def __init__(self, num_layer_groups: int, pages: PageTable, journal: Journal) -> None:
        """Room for a few blocks."""
        self._pages = pages
        self._journal = journal
        self._tables: list[npt.NDArray[np.int32]] = [np.empty(0, np.int32)] * num_layer_groups
        self._views = self._tables
        self._extend(_FIRST_BLOCKS)

    def view(self, group: int, num_blocks: int) -> npt.NDArray[np.int32]:
        """[num_blocks] int32, read-only; a view of the buffer, good until the buffer grows."""
        return self._views[group][:num_blocks]

    def write(self, group: int, first: int, pages: Sequence[int]) -> None:
        """Fill in the slots of the blocks from `first` on."""
        last = first + len(pages)
        if last > len(self._tables[0]):
            self._extend(max(last, 2 * len(self._tables[0])))
        slot = self._pages.slot
        self._tables[group][first:last] = [NONE if page == NONE else slot[page] for page in pages]

    def write_entry(self, group: int, block: int, page: int) -> None:
        """Change the slot of one block; journaled."""
        table = self._tables[group]
        self._journal.push((table.__setitem__, (block, int(table[block]))))
        table[block] = NONE if page == NONE else self._pages.slot[page]

    def keep(self, first: int, last: int) -> None:
        """Have an undo restore the entries of blocks [first, last)."""
        old = [table[first:last].copy() for table in self._tables]
        self._journal.push((self._put, (first, old)))

    def _put(self, first: int, old: Sequence[npt.NDArray[np.int32]]) -> None:
        for table, entries in zip(self._tables, old, strict=True):
            table[first : first + len(entries)] = entries

    def _extend(self, num_blocks: int) -> None:
        old = self._tables
        self._tables = [np.full(num_blocks, NONE, np.int32) for _ in old]
        for table, before in zip(self._tables, old, strict=True):
            table[: len(before)] = before
        self._views = [table.view() for table in self._tables]
        for view in self._views:
            view.flags.writeable = False
