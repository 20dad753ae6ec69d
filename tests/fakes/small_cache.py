"""A real manager, small enough for a test to fill: blocks of 4 tokens, and the cache members that a test asks for."""

from dataclasses import dataclass

from configs import DeviceTierConfig, HostTierConfig, KVCacheConfig, TierConfig
from manager import AdapterId, AdapterSizes, CacheMember, KVCacheManagerV2
from manager.geometry import CacheGeometry, LayerSpec
from manager.ids import LayerId
from scheduler.policy import CacheShape
from tests.fakes.step_contents import StepContents

TOKENS_PER_BLOCK = 4
ENCODER_TOKENS = 8
_BYTES_PER_ELEMENT = 4
_PAGE_BYTES = 2 * TOKENS_PER_BLOCK * _BYTES_PER_ELEMENT


@dataclass(frozen=True, slots=True)
class Members:
    """What requests have beside their primary cache.

    Attributes:
        draft: layers of a draft, with pages of twice the size in a pool group of their own.
        draft_padding: positions that a drafting step may write beyond its drafts.
        cross: layers for encoder output, in the primary's pool group.
        adapter_pages: pages for the adapters `a` and `b`, two each, and `c`, one; 0 is no adapters.
    """

    draft: bool = False
    draft_padding: int = 0
    cross: bool = False
    adapter_pages: int = 0

    @property
    def adapters(self) -> AdapterSizes:
        """Sizes for the manager."""
        sizes = {AdapterId("a"): 2, AdapterId("b"): 2, AdapterId("c"): 1} if self.adapter_pages else {}
        return AdapterSizes(self.adapter_pages, sizes)


PRIMARY_ONLY = Members()
EVERY_MEMBER = Members(draft=True, draft_padding=1, cross=True, adapter_pages=3)


def make_geometry(
    *,
    num_pages: int,
    max_sequences: int,
    host_pages: int = 0,
    resume_watermark: float = 1.0,
    cap_sequences: bool = True,
    members: Members = PRIMARY_ONLY,
) -> tuple[CacheGeometry, KVCacheConfig]:
    """`num_pages` of each layer group on the device, and `host_pages` in host memory.

    A pool must have a page for each sequence; `cap_sequences` asks for no more of them than that. Pool groups
    share the bytes by what a request needs of each.
    """
    max_sequences = min(max_sequences, num_pages) if cap_sequences else max_sequences
    layers = [LayerSpec(LayerId(0), num_kv_heads=1, head_dim=1)]
    if members.draft:
        layers.append(LayerSpec(LayerId(1), num_kv_heads=1, head_dim=2, member=CacheMember.DRAFT))
    if members.cross:
        layers.append(LayerSpec(LayerId(2), num_kv_heads=1, head_dim=1, member=CacheMember.CROSS))
    block_bytes = sum(_PAGE_BYTES * layer.head_dim for layer in layers)
    tiers: tuple[TierConfig, ...] = (DeviceTierConfig(quota_bytes=num_pages * block_bytes),)
    if host_pages:
        tiers = (*tiers, HostTierConfig(quota_bytes=host_pages * block_bytes))
    config = KVCacheConfig(
        tokens_per_block=TOKENS_PER_BLOCK,
        tiers=tiers,
        max_sequences=max_sequences,
        resume_watermark=resume_watermark,
    )
    geometry = CacheGeometry.from_layers(
        layers,
        config,
        _BYTES_PER_ELEMENT,
        max_encoder_tokens=ENCODER_TOKENS if members.cross else 0,
        draft_padding_tokens=members.draft_padding,
    )
    return geometry, config


def make_cache(
    *,
    num_pages: int,
    max_sequences: int,
    host_pages: int = 0,
    resume_watermark: float = 1.0,
    members: Members = PRIMARY_ONLY,
) -> tuple[KVCacheManagerV2, StepContents]:
    """A manager of this geometry, and the memory under it."""
    geometry, config = make_geometry(
        num_pages=num_pages,
        max_sequences=max_sequences,
        host_pages=host_pages,
        resume_watermark=resume_watermark,
        members=members,
    )
    contents = StepContents(geometry)
    return KVCacheManagerV2(geometry, config, engine=contents, adapters=members.adapters), contents


def make_manager(
    *,
    num_pages: int,
    max_sequences: int,
    host_pages: int = 0,
    resume_watermark: float = 1.0,
    cap_sequences: bool = True,
) -> KVCacheManagerV2:
    """With the primary only, and no memory."""
    geometry, config = make_geometry(
        num_pages=num_pages,
        max_sequences=max_sequences,
        host_pages=host_pages,
        resume_watermark=resume_watermark,
        cap_sequences=cap_sequences,
    )
    return KVCacheManagerV2(geometry, config)


def shape_of(manager: KVCacheManagerV2, members: Members = PRIMARY_ONLY) -> CacheShape:
    """Its sizes, for the scheduler."""
    return CacheShape.of(manager.geometry, members.adapters)
