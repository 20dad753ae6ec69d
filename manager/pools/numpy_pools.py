"""`NumpyPool`: slots in host memory; the reference implementation of `SlotPool`, and the host tier on a CPU."""

import numpy as np
import numpy.typing as npt


class NumpyPool:
    """Slots in one uint8 array.

    Attributes:
        memory: [num_slots * slot_bytes] uint8.
    """

    __slots__ = ("_slots", "memory", "num_slots", "slot_bytes")

    def __init__(self, num_slots: int, slot_bytes: int, memory: npt.NDArray[np.uint8] | None = None) -> None:
        """Lay the slots over `memory`, or over new zeroed memory.

        Raises:
            ValueError: `memory` is not [num_slots * slot_bytes] uint8.
        """
        size = num_slots * slot_bytes
        if memory is None:
            memory = np.zeros(size, np.uint8)
        if memory.dtype != np.uint8 or memory.shape != (size,):
            msg = f"memory is {memory.dtype} {memory.shape}, expected uint8 ({size},)"
            raise ValueError(msg)
        self.num_slots = num_slots
        self.slot_bytes = slot_bytes
        self.memory = memory
        self._slots = memory.reshape(num_slots, slot_bytes)

    def read(self, slot: int, out: npt.NDArray[np.uint8]) -> None:
        """See `SlotPool.read`."""
        out[:] = self._slots[slot]

    def write(self, slot: int, source: npt.NDArray[np.uint8]) -> None:
        """See `SlotPool.write`."""
        self._slots[slot] = source

    def close(self) -> None:
        """Nothing to release."""
