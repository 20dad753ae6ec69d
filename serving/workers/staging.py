"""How leased pages reach host memory that a peer can read, and how received ones reach the engine.

On a CPU the pool lies in shared memory itself and there is nothing to do. On a device the pool has a twin
of the same slots in shared memory: pages are copied out before their ticket is handed over, and copied in
before their request is activated. (A transport that reads device memory makes the twin needless.)
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from manager import LayerGroupId, PageLocation
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
    """The engine's pools on a device, and their twins in shared memory, slot by slot."""

    def __init__(self, pools: Mapping[LayerGroupId, tuple[TorchPool, npt.NDArray[np.uint8]]]) -> None:
        """`pools`: for each layer group its pool, and [num_slots * slot_bytes] uint8 of the registered memory."""
        self._twins = {
            group: (pool.tensor, torch.from_numpy(memory).view(pool.num_slots, pool.slot_bytes))
            for group, (pool, memory) in pools.items()
        }

    def copy_out(self, pages: Sequence[PageLocation]) -> None:
        """Gather on the device, one copy over the bus, scatter in shared memory."""
        for group, slots in _slots_by_group(pages).items():
            device, host = self._twins[group]
            host[slots] = device[slots.to(device.device)].cpu()

    def copy_in(self, pages: Sequence[PageLocation]) -> None:
        """Gather in shared memory, one copy over the bus, scatter on the device."""
        for group, slots in _slots_by_group(pages).items():
            device, host = self._twins[group]
            device[slots.to(device.device)] = host[slots].to(device.device)


def _slots_by_group(pages: Sequence[PageLocation]) -> dict[LayerGroupId, torch.Tensor]:
    by_group: dict[LayerGroupId, list[int]] = defaultdict(list)
    for page in pages:
        by_group[page.layer_group].append(page.slot)
    return {group: torch.tensor(slots, dtype=torch.int64) for group, slots in by_group.items()}
