"""A real manager without memory, small enough for a test to fill: blocks of 4 tokens, one layer group."""

from configs import DeviceTierConfig, HostTierConfig, KVCacheConfig, TierConfig
from manager import KVCacheManagerV2
from manager.geometry import CacheGeometry, LayerSpec
from manager.ids import LayerId
from scheduler.policy import CacheShape

TOKENS_PER_BLOCK = 4
_BYTES_PER_ELEMENT = 4
_PAGE_BYTES = 2 * TOKENS_PER_BLOCK * _BYTES_PER_ELEMENT


def make_manager(
    *,
    num_pages: int,
    max_sequences: int,
    host_pages: int = 0,
    resume_watermark: float = 1.0,
    cap_sequences: bool = True,
) -> KVCacheManagerV2:
    """`num_pages` on the device, `host_pages` in host memory, `max_sequences` index slots.

    A pool must have a page for each sequence; `cap_sequences` asks for no more of them than that.
    """
    max_sequences = min(max_sequences, num_pages) if cap_sequences else max_sequences
    tiers: tuple[TierConfig, ...] = (DeviceTierConfig(quota_bytes=num_pages * _PAGE_BYTES),)
    if host_pages:
        tiers = (*tiers, HostTierConfig(quota_bytes=host_pages * _PAGE_BYTES))
    config = KVCacheConfig(
        tokens_per_block=TOKENS_PER_BLOCK,
        tiers=tiers,
        max_sequences=max_sequences,
        resume_watermark=resume_watermark,
    )
    layer = LayerSpec(LayerId(0), num_kv_heads=1, head_dim=1)
    return KVCacheManagerV2(CacheGeometry.from_layers([layer], config, _BYTES_PER_ELEMENT), config)


def shape_of(manager: KVCacheManagerV2) -> CacheShape:
    """Its sizes, for the scheduler."""
    return CacheShape.of(manager.geometry)
