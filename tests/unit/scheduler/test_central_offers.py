"""Deferred offers (C2): order of arrival, no busy loop, no attempt in two places."""

from configs import CentralConfig
from scheduler.messages import OfferGeneration
from tests.fakes.central_workers import ModelWorker
from tests.fakes.central_world import CentralWorld, make_spec


def _offered(world: CentralWorld, name: str = "g0") -> list[str]:
    return [command.spec.uid for command in world.commands(name) if isinstance(command, OfferGeneration)]


def _ready(world: CentralWorld, uids: str) -> None:
    world.submit(*(make_spec(uid) for uid in uids))
    for uid in uids:
        world.compute_context(uid)


def test_a_deferred_offer_waits_until_its_worker_reports_room() -> None:
    world = CentralWorld("c0", "g0")
    _ready(world, "a")
    world.defer("a")
    assert world.load("g0") == (0, 0)
    for _ in range(5):
        world.central.tick(world.now_s)
        world.deliver()
    assert _offered(world) == ["a"]
    world.report_room("g0")
    assert _offered(world) == ["a", "a"]
    assert world.counter("deferrals") == 1


def test_the_oldest_deferred_is_offered_first_however_they_came_back() -> None:
    world = CentralWorld("c0", "g0")
    _ready(world, "abc")
    world.do_each("g0", ModelWorker.defer, "c", "a", "b")
    world.report_room("g0")
    # One offer only: the worker has just been full.
    assert _offered(world) == ["a", "b", "c", "a"]
    world.reserve("a")
    assert _offered(world)[4:] == ["b", "c"]


def test_a_younger_request_does_not_pass_a_deferred_one() -> None:
    world = CentralWorld("c0", "g0")
    _ready(world, "a")
    world.defer("a")
    world.submit(make_spec("b", num_prompt=1))
    world.compute_context("b")
    assert _offered(world) == ["a"]
    world.report_room("g0")
    assert _offered(world) == ["a", "a"]


def test_a_deferred_request_goes_to_another_worker_with_room_at_once() -> None:
    world = CentralWorld("c0", "g0", "g1")
    _ready(world, "a")
    world.defer("a", "g0")
    assert _offered(world, "g1") == ["a"]
    assert world.load("g0") == (0, 0)


def test_a_worker_whose_room_report_was_lost_is_asked_again_once_a_heartbeat() -> None:
    world = CentralWorld("c0", "g0")
    _ready(world, "a")
    for number in range(1, 4):
        world.defer("a")
        world.advance(0.2)
        assert len(_offered(world)) == number
        world.advance(0.3)
        assert len(_offered(world)) == number + 1


def test_a_worker_is_not_offered_more_than_its_limit() -> None:
    world = CentralWorld("c0", "g0", config=CentralConfig(max_offers_per_generation_worker=2))
    _ready(world, "abc")
    assert _offered(world) == ["a", "b"]
    world.reserve("a")
    world.activate("a")
    assert _offered(world) == ["a", "b"]
    world.finish("a")
    assert _offered(world) == ["a", "b", "c"]


def test_a_request_that_only_a_large_worker_takes_does_not_hide_others_from_small_ones() -> None:
    world = CentralWorld("c0", "g0")
    world.start("g1", max_request_tokens=20)
    world.submit(make_spec("big", num_prompt=60))
    world.compute_context("big")
    world.defer("big", "g0")
    world.submit(make_spec("small"))
    world.compute_context("small")
    assert _offered(world, "g1") == ["small"]
    assert _offered(world, "g0") == ["big"]


def test_an_offer_whose_request_is_cancelled_does_not_leave_its_worker_shut() -> None:
    world = CentralWorld("c0", "g0")
    _ready(world, "ab")
    world.do_each("g0", ModelWorker.defer, "a", "b")
    world.report_room("g0")
    assert _offered(world) == ["a", "b", "a"]
    world.cancel("a")
    world.do("g0", lambda worker: None)
    assert _offered(world) == ["a", "b", "a", "b"]
