"""`SlotAllocator`: which slots of one pool group in one tier are free.

Last freed, first taken; within one call slots come out in ascending order where they were freed so,
since neighbouring slots move in one copy.
"""

from collections.abc import Sequence

from manager.errors import OutOfPagesError
from manager.storage.journal import Journal


class SlotAllocator:
    """The free list of one store.

    Attributes:
        num_slots: slots in all.
        free: free slots; the next one to be taken is last.
    """

    __slots__ = ("_journal", "free", "num_slots")

    def __init__(self, num_slots: int, journal: Journal) -> None:
        """All slots are free."""
        self.num_slots = num_slots
        self.free = list(range(num_slots - 1, -1, -1))
        self._journal = journal

    def take(self, count: int) -> list[int]:
        """Remove `count` slots from the free list.

        Raises:
            OutOfPagesError: fewer are free; nothing was taken.
        """
        free = self.free
        if count > len(free):
            msg = f"{count} slots wanted, {len(free)} of {self.num_slots} free"
            raise OutOfPagesError(msg)
        if not count:
            return []
        taken = free[: -count - 1 : -1]
        del free[-count:]
        self._journal.push((self._untake, (taken,)))
        return taken

    def give(self, slots: Sequence[int]) -> None:
        """Return slots to the free list."""
        self.free.extend(slots[::-1])
        self._journal.push((self._ungive, (len(slots),)))

    def take_exactly(self, slot: int) -> None:
        """Remove this free slot; slow, for a revert that puts an evicted page back where it was."""
        place = self.free.index(slot)
        del self.free[place]
        self._journal.push((self.free.insert, (place, slot)))

    def _untake(self, taken: list[int]) -> None:
        self.free.extend(taken[::-1])

    def _ungive(self, count: int) -> None:
        if count:
            del self.free[-count:]
