"""What time alone brings about: silent and hung workers, request deadlines, silent doors (C5, I5, I8)."""

from configs import CentralConfig
from scheduler.messages import ErrorKind
from tests.fakes.central_world import DOOR, CentralWorld, make_spec


def test_a_silent_worker_is_lost_after_the_heartbeats_it_may_miss_and_no_earlier() -> None:
    world = CentralWorld("c0", "g0")
    world.submit(make_spec("a"))
    for _ in range(3):
        world.advance(0.5, silent=["c0"])
    assert world.central.lost_workers() == {}
    world.advance(0.1, silent=["c0"])
    assert list(world.central.lost_workers()) == ["c0"]
    state = world.central.state(world.now_s)["workers"][0]
    assert state["state"] == "lost"
    assert "silent for 1.60 s" in state["lost_reason"]
    world.advance(5.0)
    assert list(world.central.lost_workers()) == ["c0"]


def test_a_worker_that_beats_but_no_longer_iterates_is_hung() -> None:
    world = CentralWorld("m0")
    world.submit(make_spec("a"))
    for _ in range(23):
        world.advance(0.5)
    assert list(world.central.lost_workers()) == ["m0"]
    assert "iteration 0 has not moved" in world.notices[0].message
    assert world.notices[0].kind is ErrorKind.WORKER_LOST
    world.assert_idle()


def test_an_idle_worker_and_one_that_waits_for_a_transfer_are_not_hung() -> None:
    world = CentralWorld("c0", "g0")
    world.submit(make_spec("a"))
    world.compute_context("a")
    world.reserve("a")
    for _ in range(60):
        world.advance(0.5)
    assert world.central.lost_workers() == {}


def test_a_worker_that_iterates_is_not_hung_however_long_a_request_takes() -> None:
    world = CentralWorld("m0")
    world.submit(make_spec("a"))
    for _ in range(60):
        world.do("m0", lambda worker: None)
        world.advance(0.5)
    assert world.central.lost_workers() == {}


def test_a_request_past_its_deadline_ends_with_an_error_and_is_cancelled_everywhere() -> None:
    world = CentralWorld("c0", "g0", config=CentralConfig(request_deadline_s=5.0))
    world.submit(make_spec("old"))
    world.compute_context("old")
    world.reserve("old")
    world.advance(1.0)
    world.submit(make_spec("young"))
    for _ in range(3):
        world.advance(1.0)
    assert world.notices == []
    world.advance(1.0)
    assert [(n.uid, n.kind, n.retriable) for n in world.notices] == [("old", ErrorKind.DEADLINE, False)]
    world.advance(1.0)
    assert [notice.uid for notice in world.notices] == ["old", "young"]
    for name in world.workers:
        world.do(name, lambda worker: None)
    world.assert_idle()
    assert world.counter("expired_requests") == 2


def test_a_queued_request_expires_even_when_no_worker_lives() -> None:
    world = CentralWorld("c0", "g0", config=CentralConfig(request_deadline_s=5.0))
    world.submit(make_spec("a"))
    world.lose("c0")
    world.lose("g0")
    world.advance(5.0)
    assert [notice.kind for notice in world.notices] == [ErrorKind.DEADLINE]
    world.assert_idle()


def test_a_door_that_beat_once_and_fell_silent_is_lost_at_its_deadline() -> None:
    world = CentralWorld("m0")
    world.central.door_heartbeat(DOOR, world.now_s)
    world.submit(make_spec("a"))
    world.do("m0", lambda worker: None)
    for _ in range(5):
        world.advance(1.0)
    world.central.door_heartbeat(DOOR, world.now_s)
    for _ in range(10):
        world.do("m0", lambda worker: None)
        world.advance(1.0)
    assert world.counter("lost_doors") == 0
    world.do("m0", lambda worker: None)
    world.advance(1.0)
    assert world.counter("lost_doors") == 1
    world.do("m0", lambda worker: None)
    world.assert_idle()


def test_a_door_that_never_beats_is_not_watched() -> None:
    world = CentralWorld("m0")
    world.submit(make_spec("a"))
    for _ in range(30):
        world.do("m0", lambda worker: None)
        world.advance(1.0)
    assert world.counter("lost_doors") == world.counter("cancelled") == 0


def test_a_stall_of_the_central_scheduler_itself_costs_no_worker() -> None:
    world = CentralWorld("c0", "g0")
    world.submit(make_spec("a"))
    world.now_s += 7.0  # it stood still: the heartbeats of these seconds wait to be taken
    world.central.excuse_silence(7.0)
    world.central.tick(world.now_s)
    assert world.central.lost_workers() == {}
    for _ in range(4):
        world.advance(0.5, silent=["c0"])
    assert list(world.central.lost_workers()) == ["c0"]
