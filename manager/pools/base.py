"""`SlotPool`: memory of one pool group in one tier, cut into equal slots; `CopyEngine`: moves bytes between them."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt


class SlotPool(Protocol):
    """Equal slots of bytes. A new pool reads as zeros.

    Not thread-safe for one slot; different slots may be read and written at the same time.
    """

    @property
    def num_slots(self) -> int:
        """Slots in the pool."""
        ...

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot."""
        ...

    def read(self, slot: int, out: npt.NDArray[np.uint8]) -> None:
        """Copy a slot into `out`, [slot_bytes]. Blocks until it is there. Raises OSError where I/O fails."""
        ...

    def write(self, slot: int, source: npt.NDArray[np.uint8]) -> None:
        """Copy `source`, [slot_bytes], into a slot. Blocks until it is there. Raises OSError where I/O fails."""
        ...

    def close(self) -> None:
        """Release memory and files; may be called twice."""
        ...


class SlotCopy(NamedTuple):
    """One slot to another; stores are numbered tier by tier."""

    source_store: int
    source_slot: int
    target_store: int
    target_slot: int


class CopyEngine(Protocol):
    """Moves bytes between slots. Batches run in the order in which they were handed over."""

    def stage(self, copies: Sequence[SlotCopy]) -> None:
        """Copy and wait. Raises CopyFailedError when any copy failed."""
        ...

    def fill(self, copies: Sequence[SlotCopy]) -> None:
        """Start to copy; may return before it is done."""
        ...

    def wait(self) -> Sequence[SlotCopy]:
        """Wait for every fill; returns those that failed since the last wait."""
        ...

    def close(self) -> None:
        """Stop; may be called twice."""
        ...
