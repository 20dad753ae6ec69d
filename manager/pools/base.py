"""`SlotPool`: memory of one pool group in one tier, cut into equal slots."""

from typing import Protocol

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
