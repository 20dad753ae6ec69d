"""Device pools as the engine and a peer see them."""

import numpy as np
import numpy.typing as npt
import pytest
import torch

from configs import DeviceTierConfig, KVCacheConfig
from manager import CacheGeometry, LayerId, LayerSpec
from manager.pools.numpy_pools import NumpyPool
from manager.pools.torch_pools import TorchPool
from tests.fakes.cache_builders import make_geometry


def test_a_page_in_a_tensor_is_one_run_of_bytes_of_the_given_memory() -> None:
    layers = [LayerSpec(LayerId(n), num_kv_heads=1, head_dim=2) for n in range(2)]
    config = KVCacheConfig(tokens_per_block=4, tiers=(DeviceTierConfig(quota_bytes=8 * 128),), max_sequences=1)
    geometry = CacheGeometry.from_layers(layers, config, bytes_per_element=4)
    (group,) = geometry.layer_groups
    memory = np.ones(8 * group.page_bytes, np.uint8)
    view = TorchPool(8, group.page_bytes, memory=memory).pages(group, geometry.tokens_per_block, torch.float32)
    assert not memory.any()
    assert view.shape == (8, 2, 2, 1, 4, 2)
    view[3] = torch.arange(32, dtype=torch.float32).reshape(view[3].shape)
    assert memory.view(np.float32)[3 * 32 : 4 * 32].tolist() == list(range(32))
    assert not memory[: 3 * group.page_bytes].any()


def test_a_wider_type_than_the_geometry_was_made_for_is_refused() -> None:
    geometry, _ = make_geometry(8)
    (group,) = geometry.layer_groups
    pool = TorchPool(2, group.page_bytes)
    assert pool.pages(group, geometry.tokens_per_block, torch.uint8).shape == (2, 1, 2, 1, 4, 2)
    with pytest.raises(ValueError, match="exceed 16 bytes"):
        pool.pages(group, geometry.tokens_per_block, torch.float32)


@pytest.mark.parametrize("memory", [np.zeros(31, np.uint8), np.zeros(8, np.float32)])
def test_memory_of_another_size_or_type_is_refused(memory: npt.NDArray[np.uint8]) -> None:
    with pytest.raises(ValueError, match="memory is"):
        TorchPool(2, 16, memory=memory)
    with pytest.raises(ValueError, match="memory is"):
        NumpyPool(2, 16, memory=memory)
