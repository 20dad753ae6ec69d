"""How leased pages reach host memory that a peer can read, and how received ones reach the engine.

On a CPU the pool lies in shared memory itself and there is nothing to do. On a device the pool has a twin
of the same slots in shared memory: pages are copied out before their ticket is handed over, and copied in
before their request is activated. (A transport that reads device memory makes the twin needless.)
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from manager import PageLocation
from manager.pools.torch_pools import TorchPool


class PageStaging(Protocol):
    """Between the engine's pool and the memory that the transport knows. The loop's thread."""

    def copy_out(self, pages: Sequence[PageLocation]) -> None:
        """Make these pages readable by peers; blocks until they are."""
        ...

    def copy_in(self, pages: Sequence[PageLocation]) -> None:
        """Make these received pages readable by the engine; ordered before the next step."""
        ...


class SharedPool:
    """The engine's pool is the shared memory."""

    def copy_out(self, pages: Sequence[PageLocation]) -> None:
        """Nothing to do."""

    def copy_in(self, pages: Sequence[PageLocation]) -> None:
        """Nothing to do."""


class TwinPool:
    """The engine's pool on a device, and its twin in shared memory, slot by slot."""

    def __init__(self, pool: TorchPool, memory: npt.NDArray[np.uint8]) -> None:
        """`memory`: [num_slots * slot_bytes] uint8, the registered one."""
        self._device = pool.tensor
        self._host = torch.from_numpy(memory).view(pool.num_slots, pool.slot_bytes)

    def copy_out(self, pages: Sequence[PageLocation]) -> None:
        """Gather on the device, one copy over the bus, scatter in shared memory."""
        slots = torch.tensor([page.slot for page in pages], dtype=torch.int64)
        self._host[slots] = self._device[slots.to(self._device.device)].cpu()

    def copy_in(self, pages: Sequence[PageLocation]) -> None:
        """Gather in shared memory, one copy over the bus, scatter on the device."""
        slots = torch.tensor([page.slot for page in pages], dtype=torch.int64)
        self._device[slots.to(self._device.device)] = self._host[slots].to(self._device.device)
