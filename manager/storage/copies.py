"""`CopyQueue`: which slots a transaction copies where, decided in the plan and run by its commit (M3).

stage   host -> disk, then device -> host or disk     before publish; a failure undoes the transaction
fill    host or disk -> device, device -> device      after publish; a failure costs the requests that read it
"""

from collections.abc import Sequence
from dataclasses import dataclass

from manager.pools.base import SlotCopy
from manager.storage.journal import Journal


class NoCopies:
    """The engine of a manager without memory: bookkeeping only."""

    def stage(self, copies: Sequence[SlotCopy]) -> None:
        """Nothing to copy."""

    def fill(self, copies: Sequence[SlotCopy]) -> None:
        """Nothing to copy."""

    def wait(self) -> Sequence[SlotCopy]:
        """Nothing can have failed."""
        return ()

    def close(self) -> None:
        """Nothing to stop."""


@dataclass(frozen=True, slots=True)
class PendingFill:
    """Where a page's data is until its fill has run."""

    source_store: int
    source_slot: int


class CopyQueue:
    """Copies of the open transaction.

    Attributes:
        stages: copies out, in order.
        fills: by promoted page; the target is wherever the page is when the transaction commits.
        clones: by new page, the page whose content it starts with, wherever both are then.
        freed: slots of lower tiers that are free from the next transaction on.
    """

    __slots__ = ("_journal", "clones", "fills", "freed", "stages")

    def __init__(self, journal: Journal) -> None:
        """Empty."""
        self._journal = journal
        self.stages: list[SlotCopy] = []
        self.fills: dict[int, PendingFill] = {}
        self.clones: dict[int, int] = {}
        self.freed: list[tuple[int, int]] = []

    @property
    def is_empty(self) -> bool:
        """Whether nothing is copied, and no slot of a lower tier becomes free."""
        return not (self.stages or self.fills or self.clones or self.freed)

    def add_stage(self, copy: SlotCopy) -> None:
        """Copy out before publish."""
        self.stages.append(copy)
        self._journal.push((self._drop_stage, ()))

    def add_fill(self, page: int, source_store: int, source_slot: int) -> None:
        """Copy in after publish."""
        self.fills[page] = PendingFill(source_store, source_slot)
        self._journal.push((self._drop_fill, (page,)))

    def cancel_fill(self, page: int) -> PendingFill:
        """The page goes back to where its data is."""
        fill = self.fills.pop(page)
        self._journal.push((self.fills.__setitem__, (page, fill)))
        return fill

    def add_clone(self, page: int, source: int) -> None:
        """Copy the content of `source` into a new page after publish."""
        self.clones[page] = source
        self._journal.push((self._drop_clone, (page,)))

    def cancel_clone(self, page: int) -> int:
        """The new page is not wanted any more; returns its source."""
        source = self.clones.pop(page)
        self._journal.push((self.clones.__setitem__, (page, source)))
        return source

    def free_later(self, store: int, slot: int) -> None:
        """A slot of a lower tier: its data must outlive this transaction."""
        self.freed.append((store, slot))
        self._journal.push((self._drop_freed, ()))

    def keep_after_all(self, store: int, slot: int) -> None:
        """Undo `free_later`."""
        place = self.freed.index((store, slot))
        del self.freed[place]
        self._journal.push((self.freed.insert, (place, (store, slot))))

    def clear(self) -> None:
        """The transaction is over."""
        if not self.is_empty:
            self.stages.clear()
            self.fills.clear()
            self.clones.clear()
            self.freed.clear()

    def _drop_stage(self) -> None:
        self.stages.pop()

    def _drop_fill(self, page: int) -> None:
        del self.fills[page]

    def _drop_clone(self, page: int) -> None:
        del self.clones[page]

    def _drop_freed(self) -> None:
        self.freed.pop()
