"""Sizes that cannot work, or could deadlock, are refused at start-up, with the arithmetic in the message."""

from collections.abc import Callable

import pytest

from configs import DeploymentConfig, DeviceTierConfig, KVCacheConfig, SchedulerConfig
from manager import CacheConfigError, CacheGeometry, CacheMember, KVCacheManagerV2, LayerId, LayerSpec
from tests.conftest import Register
from tests.fakes.cache_builders import compute_context, free, make_geometry, make_layers
from tests.fakes.cache_request import FakeRequest


def chunk(num_slots: int, tokens: int, windows: tuple[int | None, ...] = (None,)) -> None:
    make_geometry(num_slots, windows=windows, chunk_tokens=tokens)


def longest_request(quota_bytes: int, tokens: int) -> None:
    tiers = (DeviceTierConfig(quota_bytes=quota_bytes),)
    config = KVCacheConfig(tokens_per_block=4, tiers=tiers, max_sequences=1, required_request_tokens=tokens)
    CacheGeometry.from_layers(make_layers(), config, bytes_per_element=1)


def encoder_layers(member: CacheMember, window: int | None, max_encoder_tokens: int) -> None:
    layers = [LayerSpec(LayerId(0), 1, 2), LayerSpec(LayerId(1), 1, 2, window, member=member)]
    config = KVCacheConfig(tokens_per_block=4, tiers=(DeviceTierConfig(quota_bytes=1 << 12),))
    CacheGeometry.from_layers(layers, config, bytes_per_element=1, max_encoder_tokens=max_encoder_tokens)


def batch_without_seats() -> None:
    DeploymentConfig(scheduler=SchedulerConfig(max_batch_size=65), cache=KVCacheConfig(max_sequences=64))


REFUSALS: dict[str, tuple[Callable[[], object], str]] = {
    "fewer slots than admissible requests": (
        lambda: make_geometry(3, max_sequences=4),
        r"quota of 48 bytes: max_sequences=4 .* 4 x 16 = 64 bytes",
    ),
    "fewer index slots than a batch": (
        batch_without_seats,
        r"max_batch_size=65 exceeds cache.max_sequences=64",
    ),
    "a pool smaller than one chunk": (
        lambda: chunk(5, 21),
        r"chunk_tokens=21 takes 6 pages of 16 bytes .* 96 bytes; .* is 5 pages",
    ),
    "a pool smaller than one chunk of every layer group": (
        lambda: chunk(11, 24, (None, 8)),
        r"chunk_tokens=24 takes 12 pages .*, 2 layer groups\), 192 bytes; .* is 11 pages",
    ),
    "a pool smaller than one chunk beside its window": (
        lambda: chunk(9, 24, (None, 8)),
        r"9 device slots, but the windows of one request alone keep 9 pages in chunks of 24, .* takes 1 more",
    ),
    "a pool smaller than the longest request": (
        lambda: longest_request(6 * 16, 25),
        r"required_request_tokens=25 takes 7 pages of 16 bytes .* 112 bytes; .* is 6 pages",
    ),
    "a window smaller than a block": (
        lambda: make_geometry(16, windows=[3]),
        r"window=3 is smaller than tokens_per_block=4",
    ),
    "a pool smaller than one window": (
        lambda: make_geometry(4, windows=[16], max_sequences=1),
        r"4 device slots, but the windows of one request alone keep 5 pages",
    ),
    "a window over encoder output": (
        lambda: encoder_layers(CacheMember.CROSS, 8, 8),
        r"layer 1 keeps encoder output, which is seen whole: window=8",
    ),
    "encoder output without a length": (
        lambda: encoder_layers(CacheMember.CROSS, None, 0),
        r"1 of 2 layer groups keep encoder output, max_encoder_tokens=0",
    ),
    "no layers": (
        lambda: CacheGeometry.from_layers([], KVCacheConfig(), bytes_per_element=4),
        r"at least one layer",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_sizes_that_cannot_work_are_refused_with_the_numbers(case: str) -> None:
    make, message = REFUSALS[case]
    with pytest.raises((CacheConfigError, ValueError), match=message):
        make()


def test_the_least_sizes_that_can_work_are_accepted() -> None:
    make_geometry(4, max_sequences=4)
    chunk(6, 21)
    chunk(12, 24, (None, 8))
    longest_request(7 * 16, 25)
    make_geometry(16, windows=[4])


@pytest.mark.parametrize("reuse", [True, False], ids=["reuse", "no reuse"])
@pytest.mark.parametrize("chunk_tokens", [1, 6, 8])
@pytest.mark.parametrize("window", [7, 8, 9, 11, 12, 13, 15, 16, 17])
def test_no_window_around_a_multiple_of_the_block_can_deadlock_in_the_least_pool(
    audited: Register, window: int, chunk_tokens: int, reuse: bool
) -> None:
    """The least pool that is accepted takes a request of many windows to its end, in chunks, then token by token."""
    least, refusal = 1, ""
    while True:
        try:
            geometry, config = make_geometry(
                least, windows=[window], max_sequences=1, chunk_tokens=chunk_tokens, enable_block_reuse=reuse
            )
            break
        except CacheConfigError as error:
            least, refusal = least + 1, str(error)
    assert f"in chunks of {chunk_tokens}" in refusal
    for start in (1, 2, 3, 4):
        manager = audited(KVCacheManagerV2(geometry, config))
        request = FakeRequest("r", [1] * (start + 4 * window))
        compute_context(manager, request, start)
        while len(request.token_ids) < 6 * window:
            rest = len(request.token_ids) - manager.history_length(request.request_id)
            compute_context(manager, request, min(rest, chunk_tokens))
            if rest <= chunk_tokens:
                request.token_ids.append(len(request.token_ids) % 3)
        free(manager, request)
