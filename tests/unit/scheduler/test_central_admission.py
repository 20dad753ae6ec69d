"""What is refused on submission, by kind and with the numbers; and health."""

from configs import CentralConfig
from scheduler.messages import DoorNotice, ErrorKind
from tests.fakes.central_world import CentralWorld, make_spec


def _kinds(notices: tuple[DoorNotice, ...]) -> list[tuple[str, ErrorKind]]:
    return [(notice.uid, notice.kind) for notice in notices]


def test_without_a_worker_of_a_needed_role_a_request_is_refused_by_name() -> None:
    for workers, role in (((), "context"), (("c0",), "generation"), (("g0",), "context")):
        world = CentralWorld(*workers)
        refused = world.submit(make_spec("a")).refused
        assert _kinds(refused) == [("a", ErrorKind.NO_WORKER)]
        assert f"no live {role}" in refused[0].message
        assert world.central.health()[0] is False
        assert f"no live {role}" in world.central.health()[1]
        world.assert_idle()


def test_health_is_good_with_a_worker_of_each_role_and_names_the_lost_one() -> None:
    world = CentralWorld("c0", "g0")
    assert world.central.health() == (True, "")
    world.lose("g0")
    assert world.central.health() == (False, "no live generation worker; g0 was lost: killed")
    world.start("g0")
    assert world.central.health() == (True, "")


def test_a_request_longer_than_every_worker_takes_is_refused_with_the_numbers() -> None:
    world = CentralWorld("c0", "g0")
    world.start("g1", max_request_tokens=60)
    refused = world.submit(make_spec("a", num_prompt=90, max_tokens=11), make_spec("b", 90, 10)).refused
    assert _kinds(refused) == [("a", ErrorKind.NEVER_FITS)]
    assert "needs 101 tokens; the largest generation worker takes 100" in refused[0].message


def test_a_prompt_longer_than_every_context_worker_takes_is_refused() -> None:
    world = CentralWorld("g0")
    world.start("c0", max_request_tokens=20)
    assert _kinds(world.submit(make_spec("a", num_prompt=21)).refused) == [("a", ErrorKind.NEVER_FITS)]
    assert world.submit(make_spec("b", num_prompt=20, max_tokens=70)).refused == ()


def test_a_large_request_waits_for_the_worker_that_takes_it() -> None:
    world = CentralWorld("c0", "g0")
    world.start("c1", max_request_tokens=20)
    world.submit(make_spec("a", num_prompt=60))
    assert world.load("c1") == (0, 0)
    assert world.load("c0") == (1, 60)


def test_a_full_queue_refuses_new_requests_and_keeps_those_it_has() -> None:
    config = CentralConfig(max_queued_requests=2, max_running_per_context_worker=1)
    world = CentralWorld("c0", "g0", config=config)
    refused = world.submit(*(make_spec(uid) for uid in "a")).refused
    refused += world.submit(*(make_spec(uid) for uid in "bcd")).refused
    assert _kinds(refused) == [("d", ErrorKind.QUEUE_FULL)]
    assert "2 requests are queued, the limit is 2" in refused[0].message
    world.compute_context("a")
    assert world.submit(make_spec("d")).refused == ()


def test_a_request_that_was_begun_is_not_turned_away_for_a_full_queue_or_a_restarting_worker() -> None:
    config = CentralConfig(max_queued_requests=1, max_running_per_context_worker=1)
    world = CentralWorld("c0", "g0", config=config)
    world.submit(make_spec("a"))
    world.submit(make_spec("b"))
    assert world.submit(make_spec("begun", accepted=2)).refused == ()
    world.lose("g0")
    world.advance(60.0)
    assert world.submit(make_spec("begun-too", accepted=1)).refused == ()


def test_new_requests_are_queued_for_a_while_when_the_last_worker_of_a_role_was_just_lost() -> None:
    world = CentralWorld("c0", "g0")
    world.lose("g0")
    assert world.submit(make_spec("a")).refused == ()
    world.advance(59.0)
    assert world.submit(make_spec("b")).refused == ()
    world.advance(1.5)
    assert _kinds(world.submit(make_spec("c")).refused) == [("c", ErrorKind.NO_WORKER)]


def test_an_empty_prompt_is_refused() -> None:
    world = CentralWorld("c0", "g0")
    assert _kinds(world.submit(make_spec("a", num_prompt=0)).refused) == [("a", ErrorKind.INVALID)]


def test_one_refusal_does_not_touch_the_others_of_a_submission() -> None:
    world = CentralWorld("c0", "g0")
    refused = world.submit(make_spec("a"), make_spec("long", num_prompt=500), make_spec("b")).refused
    assert _kinds(refused) == [("long", ErrorKind.NEVER_FITS)]
    assert world.load("c0") == (2, 20)
    assert world.counter("refused") == 1
