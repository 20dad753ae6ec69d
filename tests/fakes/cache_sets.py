"""Managers whose requests have draft layers, encoder output and adapters."""

from configs import DeviceTierConfig, HostTierConfig, KVCacheConfig, TierConfig
from manager import AdapterId, CacheGeometry, KVCacheManagerV2, LayerId, LayerSpec
from manager.adapters import AdapterSizes
from manager.ids import CacheMember

TOKENS_PER_BLOCK = 4
PAGE_BYTES = 2 * 2 * TOKENS_PER_BLOCK
ENCODER_TOKENS = 8
ADAPTERS = {AdapterId("a"): 2, AdapterId("b"): 2, AdapterId("c"): 1}


def make_set_manager(
    num_slots: int = 24, *, host_slots: int = 0, max_sequences: int = 4, adapter_pages: int = 4
) -> KVCacheManagerV2:
    """One layer each of the model, its draft and its encoder's output, in one pool group; pages of one size."""
    layers = [
        LayerSpec(LayerId(0), 1, 2),
        LayerSpec(LayerId(1), 1, 2, member=CacheMember.DRAFT),
        LayerSpec(LayerId(2), 1, 2, member=CacheMember.CROSS),
    ]
    tiers: list[TierConfig] = [DeviceTierConfig(quota_bytes=num_slots * PAGE_BYTES)]
    if host_slots:
        tiers.append(HostTierConfig(quota_bytes=host_slots * PAGE_BYTES))
    config = KVCacheConfig(tokens_per_block=TOKENS_PER_BLOCK, tiers=tuple(tiers), max_sequences=max_sequences)
    geometry = CacheGeometry.from_layers(layers, config, bytes_per_element=1, max_encoder_tokens=ENCODER_TOKENS)
    return KVCacheManagerV2(geometry, config, adapters=AdapterSizes(adapter_pages, ADAPTERS))
