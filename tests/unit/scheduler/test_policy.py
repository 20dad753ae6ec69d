import pytest

from configs import SchedulerConfig, SchedulingPolicy
from manager import KVCacheManagerV2, PoolGroupId
from scheduler.policy import CacheShape, LayerGroupShape, Ordering, PageReckoning
from scheduler.states import AttemptEvent, AttemptState
from tests.conftest import Register
from tests.fakes.attempts import make_request
from tests.fakes.cache_builders import granted, make_geometry
from tests.fakes.cache_request import FakeRequest

ORDERING = Ordering(arrivals_per_priority=10)
GROUP, TWIN = PoolGroupId(0), PoolGroupId(1)
SHAPE = CacheShape(
    tokens_per_block=4,
    layer_groups=(LayerGroupShape(GROUP), LayerGroupShape(TWIN), LayerGroupShape(TWIN)),
    total_pages={GROUP: 12, TWIN: 16},
    max_request_tokens=32,
)


def reckoning(policy: SchedulingPolicy = SchedulingPolicy.MAX_UTILIZATION) -> PageReckoning:
    return PageReckoning(SHAPE, SchedulerConfig(policy=policy))


def test_victims_are_strictly_behind_and_the_last_comes_first() -> None:
    a, b, c, d = (make_request(name, arrival=i) for i, name in enumerate("abcd"))
    assert ORDERING.victims_behind(b, [a, b, c, d]) == [d, c]


def test_a_lower_priority_is_pushed_out_before_a_newer_arrival() -> None:
    old_low = make_request("old", arrival=0, priority=-1)
    new = make_request("new", arrival=5)
    first = make_request("first", arrival=0, priority=1)
    assert ORDERING.victims_behind(first, [new, old_low]) == [old_low, new]


def test_no_two_requests_are_each_others_victims() -> None:
    requests = [make_request(f"r{i}", arrival=i, priority=i % 3) for i in range(12)]
    for one in requests:
        for other in ORDERING.victims_behind(one, requests):
            assert one not in ORDERING.victims_behind(other, requests)


def test_a_request_that_can_need_no_further_block_reserves_no_growth() -> None:
    short = make_request("short", 3, max_tokens=1)
    assert reckoning().growth([short]) == {GROUP: 0, TWIN: 0}


def test_a_request_that_will_outgrow_its_block_reserves_one_in_every_pool_group() -> None:
    growing = make_request("growing", 4, max_tokens=4)
    assert reckoning().growth([growing, growing]) == {GROUP: 2, TWIN: 4}


def test_a_full_window_reserves_no_growth_since_a_block_leaves_for_each_that_comes() -> None:
    shape = CacheShape(4, (LayerGroupShape(GROUP, max_blocks=3),), {GROUP: 3}, 1000)
    windowed = PageReckoning(shape, SchedulerConfig())
    assert windowed.growth([make_request("short", 8, max_tokens=50)]) == {GROUP: 1}
    assert windowed.growth([make_request("long", 12, max_tokens=50)]) == {GROUP: 0}


@pytest.mark.parametrize("reuse", [True, False], ids=["reuse", "no reuse"])
@pytest.mark.parametrize("chunk_tokens", [1, 6, 8])
def test_a_window_counts_with_as_many_pages_as_a_request_ever_holds_in_it(
    audited: Register, chunk_tokens: int, reuse: bool
) -> None:
    geometry, config = make_geometry(
        32, windows=[11], num_sink_tokens=3, chunk_tokens=chunk_tokens, enable_block_reuse=reuse
    )
    held = [most_pages_held(audited(KVCacheManagerV2(geometry, config)), start, chunk_tokens) for start in (1, 2, 3, 4)]
    assert CacheShape.of(geometry).layer_groups[0].max_blocks == max(held)


def most_pages_held(manager: KVCacheManagerV2, start: int, chunk_tokens: int) -> int:
    """By a request of 64 tokens, the first `start` of them in a chunk of their own."""
    request, total = FakeRequest("r", [1] * 64), manager.availability().pages[GROUP]
    most, history, size = 0, 0, start
    while history < len(request.token_ids):
        plan = manager.begin_plan()
        granted(manager.prepare_context(request))
        granted(manager.resize_context(request, size))
        plan.commit()
        most = max(most, total - manager.availability().pages[GROUP])
        complete = manager.begin_complete()
        manager.advance(request, size)
        complete.commit()
        history = manager.history_length(request.request_id)
        size = min(chunk_tokens, len(request.token_ids) - history)
    return most


def test_an_offer_counts_with_the_place_of_its_first_decode_step() -> None:
    request = make_request("offer", 4, max_tokens=4)
    assert reckoning().growth([request])[GROUP] == 1
    offered = make_request("offer", 4, max_tokens=4)
    offered.state = AttemptState.DISAGG_GENERATION_INIT
    assert reckoning().growth([offered])[GROUP] == 0
    offered.on_event(AttemptEvent.RESERVED, 0.0)
    assert reckoning().growth([offered])[GROUP] == 0


def test_the_worst_case_counts_every_admitted_request_to_its_last_token() -> None:
    admitted = [make_request("a", 8, max_tokens=8)]
    reckon = reckoning(SchedulingPolicy.GUARANTEED_NO_EVICT)
    assert reckon.fits_worst_case(admitted, make_request("b", 8, max_tokens=8), context_only=False)
    assert not reckon.fits_worst_case(admitted, make_request("b", 8, max_tokens=9), context_only=False)
    assert reckon.fits_worst_case(admitted, make_request("b", 8, max_tokens=9), context_only=True)


def test_the_default_policy_reckons_with_no_worst_case() -> None:
    many = [make_request(str(i), 8) for i in range(9)]
    assert reckoning().fits_worst_case(many, many[0], context_only=False)
