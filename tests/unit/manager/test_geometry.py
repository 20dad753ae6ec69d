"""Sizes, and the refusal of those that cannot work."""

import pytest

from configs import DeviceTierConfig, KVCacheConfig, ModelConfig
from manager import CacheGeometry, LayerId, LayerSpec, TierLevel
from tests.fakes.cache_builders import make_geometry

SMOLLM2 = ModelConfig(
    num_layers=30,
    hidden_size=576,
    intermediate_size=1536,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    vocab_size=49152,
    max_position=8192,
    rope_theta=1e5,
    rms_norm_eps=1e-5,
    tie_embeddings=True,
)


def test_a_page_holds_all_layers_of_its_group() -> None:
    geometry = CacheGeometry.from_model(SMOLLM2, KVCacheConfig(), bytes_per_element=4)
    (group,) = geometry.layer_groups
    assert group.page_shape(16) == (30, 2, 3, 16, 64)
    assert group.page_bytes == 16 * 46_080
    assert geometry.num_slots(TierLevel.DEVICE, group.pool_group_id) == (1 << 30) // (16 * 46_080)
    assert geometry.num_slots(TierLevel.HOST, group.pool_group_id) == 0
    assert geometry.max_request_tokens == 8192


def test_the_longest_request_is_bounded_by_the_device_pool() -> None:
    geometry, _ = make_geometry(16)
    assert geometry.max_request_tokens == 64


def test_layers_of_one_life_cycle_share_a_page() -> None:
    geometry, _ = make_geometry(64, windows=[None, 8, None, 8])
    assert [group.layer_ids for group in geometry.layer_groups] == [(0, 2), (1, 3)]
    assert len(geometry.pool_groups) == 1


def test_pages_of_different_sizes_get_pools_of_their_own_within_the_quota() -> None:
    layers = [LayerSpec(LayerId(0), 1, 2), LayerSpec(LayerId(1), 1, 2), LayerSpec(LayerId(2), 1, 2, window=8)]
    config = KVCacheConfig(tokens_per_block=4, tiers=(DeviceTierConfig(quota_bytes=2000),), max_sequences=2)
    geometry = CacheGeometry.from_layers(layers, config, bytes_per_element=1)
    assert [pool.page_bytes for pool in geometry.pool_groups] == [32, 16]
    assert all(pool.num_slots[0] >= 2 for pool in geometry.pool_groups)
    assert sum(pool.num_slots[0] * pool.page_bytes for pool in geometry.pool_groups) <= 2000


@pytest.mark.parametrize(
    ("history", "sinks", "stale"),
    [(8, 0, range(0)), (11, 0, range(1)), (12, 0, range(1)), (15, 0, range(2)), (15, 3, range(1, 2))],
)
def test_blocks_leave_the_window_when_no_later_query_sees_them(history: int, sinks: int, stale: range) -> None:
    geometry, _ = make_geometry(64, windows=[8], num_sink_tokens=sinks)
    assert list(geometry.layer_groups[0].stale_blocks(history, 4)) == list(stale)
