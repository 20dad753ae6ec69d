"""Pages of a device pool go through a twin in host memory, slot by slot."""

import numpy as np
import torch

from manager import BlockOrdinal, LayerGroupId, PageLocation, SlotId
from manager.pools.torch_pools import TorchPool
from serving.workers.staging import TwinPool

GROUP, OTHER = LayerGroupId(0), LayerGroupId(1)


def _pages(*slots: int, group: LayerGroupId = GROUP) -> list[PageLocation]:
    return [PageLocation(BlockOrdinal(n), group, SlotId(slot)) for n, slot in enumerate(slots)]


def test_copy_out_moves_exactly_the_named_slots() -> None:
    pool, memory = TorchPool(4, 8), np.full(32, 255, dtype=np.uint8)
    pool.tensor[:] = torch.arange(4, dtype=torch.uint8)[:, None]
    TwinPool({GROUP: (pool, memory)}).copy_out(_pages(3, 1))
    assert memory.reshape(4, 8).tolist() == [[255] * 8, [1] * 8, [255] * 8, [3] * 8]


def test_copy_in_moves_exactly_the_named_slots() -> None:
    pool, memory = TorchPool(4, 8), np.repeat(np.arange(4, dtype=np.uint8), 8)
    TwinPool({GROUP: (pool, memory)}).copy_in(_pages(2))
    assert pool.tensor[:, 0].tolist() == [0, 0, 2, 0]


def test_no_pages_are_no_copy() -> None:
    pool, memory = TorchPool(2, 8), np.zeros(16, dtype=np.uint8)
    twin = TwinPool({GROUP: (pool, memory)})
    twin.copy_in(_pages())
    twin.copy_out(_pages())
    assert not memory.any()


def test_each_layer_group_goes_through_its_own_pool() -> None:
    pools = {GROUP: (TorchPool(4, 8), np.zeros(32, np.uint8)), OTHER: (TorchPool(3, 16), np.zeros(48, np.uint8))}
    for pool, _ in pools.values():
        pool.tensor[:] = torch.arange(1, pool.num_slots + 1, dtype=torch.uint8)[:, None]
    TwinPool(pools).copy_out([*_pages(2), *_pages(2, group=OTHER)])
    assert pools[GROUP][1].reshape(4, 8)[:, 0].tolist() == [0, 0, 3, 0]
    assert pools[OTHER][1].reshape(3, 16)[:, 0].tolist() == [0, 0, 3]
