"""Small managers and whole steps of a request, for tests of everything that stands on a manager."""

from collections.abc import Sequence

from configs import DeviceTierConfig, DiskTierConfig, HostTierConfig, KVCacheConfig, TierConfig
from manager import CacheGeometry, CacheRequest, Epoch, Grant, KVCacheManagerV2, LayerId, LayerSpec, Refusal

TOKENS_PER_BLOCK = 4


def make_layers(
    windows: Sequence[int | None] = (None,), *, num_sink_tokens: int = 0, head_dim: int = 2
) -> list[LayerSpec]:
    """One layer per entry; None for full attention."""
    return [
        LayerSpec(LayerId(n), 1, head_dim, window, num_sink_tokens if window is not None else 0)
        for n, window in enumerate(windows)
    ]


def make_geometry(  # noqa: PLR0913 - every test wants to vary something else
    num_slots: int = 16,
    *,
    windows: Sequence[int | None] = (None,),
    max_sequences: int = 4,
    tokens_per_block: int = TOKENS_PER_BLOCK,
    host_slots: int = 0,
    disk_slots: int = 0,
    num_sink_tokens: int = 0,
    head_dim: int = 2,
    resume_watermark: float = 1.0,
    enable_block_reuse: bool = True,
    enable_partial_reuse: bool = True,
    event_queue_blocks: int = 0,
    chunk_tokens: int = 1,
) -> tuple[CacheGeometry, KVCacheConfig]:
    """Sizes in slots (of all pool groups together, split by need) instead of bytes; 1 KV head, elements of 1 byte."""
    layers = make_layers(windows, num_sink_tokens=num_sink_tokens, head_dim=head_dim)
    kinds = {layer.window for layer in layers}
    page_bytes = 2 * head_dim * tokens_per_block * len(layers) // len(kinds)
    tiers: list[TierConfig] = [DeviceTierConfig(quota_bytes=num_slots * page_bytes)]
    if host_slots:
        tiers.append(HostTierConfig(quota_bytes=host_slots * page_bytes))
    if disk_slots:
        tiers.append(DiskTierConfig(quota_bytes=disk_slots * page_bytes))
    config = KVCacheConfig(
        tokens_per_block=tokens_per_block,
        tiers=tuple(tiers),
        max_sequences=max_sequences,
        resume_watermark=resume_watermark,
        enable_block_reuse=enable_block_reuse,
        enable_partial_reuse=enable_partial_reuse,
        event_queue_blocks=event_queue_blocks,
    )
    return CacheGeometry.from_layers(layers, config, bytes_per_element=1, chunk_tokens=chunk_tokens), config


def make_manager(
    num_slots: int = 16, *, windows: Sequence[int | None] = (None,), max_sequences: int = 4
) -> KVCacheManagerV2:
    """A manager without memory: bookkeeping only, device tier only."""
    geometry, config = make_geometry(num_slots, windows=windows, max_sequences=max_sequences)
    return KVCacheManagerV2(geometry, config, Epoch(7))


def granted(answer: Grant | Refusal) -> Grant:
    """The grant, or a failed test that says why there is none."""
    assert isinstance(answer, Grant), str(answer)
    return answer


def refused(answer: Grant | Refusal) -> Refusal:
    """The refusal, or a failed test."""
    assert isinstance(answer, Refusal), str(answer)
    return answer


def compute_context(manager: KVCacheManagerV2, request: CacheRequest, num_tokens: int | None = None) -> None:
    """Plan and complete one context chunk; the whole rest when `num_tokens` is None."""
    plan = manager.begin_plan()
    granted(manager.prepare_context(request))
    rest = len(request.token_ids) - manager.history_length(request.request_id)
    size = rest if num_tokens is None else num_tokens
    granted(manager.resize_context(request, size))
    plan.commit()
    complete = manager.begin_complete()
    manager.advance(request, size)
    complete.commit()


def free(manager: KVCacheManagerV2, request: CacheRequest) -> None:
    """Finish a request."""
    complete = manager.begin_complete()
    manager.free_resources(request)
    complete.commit()
