"""Pages of a device pool go through a twin in host memory, slot by slot."""

import numpy as np
import torch

from manager import BlockOrdinal, LayerGroupId, PageLocation, SlotId
from manager.pools.torch_pools import TorchPool
from serving.workers.staging import TwinPool


def _pages(*slots: int) -> list[PageLocation]:
    return [PageLocation(BlockOrdinal(n), LayerGroupId(0), SlotId(slot)) for n, slot in enumerate(slots)]


def test_copy_out_moves_exactly_the_named_slots() -> None:
    pool, memory = TorchPool(4, 8), np.full(32, 255, dtype=np.uint8)
    pool.tensor[:] = torch.arange(4, dtype=torch.uint8)[:, None]
    TwinPool(pool, memory).copy_out(_pages(3, 1))
    assert memory.reshape(4, 8).tolist() == [[255] * 8, [1] * 8, [255] * 8, [3] * 8]


def test_copy_in_moves_exactly_the_named_slots() -> None:
    pool, memory = TorchPool(4, 8), np.repeat(np.arange(4, dtype=np.uint8), 8)
    TwinPool(pool, memory).copy_in(_pages(2))
    assert pool.tensor[:, 0].tolist() == [0, 0, 2, 0]


def test_no_pages_are_no_copy() -> None:
    pool, memory = TorchPool(2, 8), np.zeros(16, dtype=np.uint8)
    twin = TwinPool(pool, memory)
    twin.copy_in(_pages())
    twin.copy_out(_pages())
    assert not memory.any()
