"""`TierCopies`: moves nothing between tiers, and takes the time that it would."""

from collections.abc import Callable, Sequence

from manager.pools.base import SlotCopy


class TierCopies:
    """A `CopyEngine` of one worker. Fills are paid when they start: the step that reads them waits for them."""

    def __init__(self, spend: Callable[[float], None], page_bytes: int, bytes_per_s: float) -> None:
        """Args.

        spend: moves the worker's clock on.
        page_bytes: of one slot.
        bytes_per_s: between any two tiers.
        """
        self._spend = spend
        self._seconds_per_copy = page_bytes / bytes_per_s

    def stage(self, copies: Sequence[SlotCopy]) -> None:
        """Take the time."""
        self._spend(len(copies) * self._seconds_per_copy)

    def fill(self, copies: Sequence[SlotCopy]) -> None:
        """Take the time."""
        self._spend(len(copies) * self._seconds_per_copy)

    def wait(self) -> Sequence[SlotCopy]:
        """Nothing is under way, and nothing failed."""
        return ()

    def close(self) -> None:
        """Nothing to stop."""
