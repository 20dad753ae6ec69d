"""A new term learns what runs, adopts it, and cancels what nobody owns (C6)."""

from configs import CentralConfig, DispatchPolicy
from scheduler.messages import DeliverHandoff, ErrorKind, OfferGeneration, RunContext
from scheduler.spec import Term
from tests.fakes.central_world import DOOR, CentralWorld, make_spec

A, B = make_spec("a"), make_spec("b")


def _kinds(world: CentralWorld, name: str) -> list[type]:
    return [type(command) for command in world.commands(name)]


def test_a_stream_that_decodes_is_adopted_and_finishes_under_its_old_attempt() -> None:
    world = CentralWorld("c0", "g0")
    world.submit(A)
    world.compute_context("a")
    world.reserve("a")
    world.activate("a")
    attempt_id = world.attempt("g0", "a")
    world.succeed(4, A)
    assert world.attempt("g0", "a") == attempt_id
    assert world.load("g0") == (1, 10)
    world.finish("a")
    world.assert_idle()
    assert (world.counter("adopted"), world.counter("completed"), world.counter("orphans")) == (1, 1, 0)
    assert world.notices == []


def test_every_phase_of_a_handoff_is_adopted_where_it_stands() -> None:
    for steps in ([], ["compute_context"], ["compute_context", "reserve"]):
        world = CentralWorld("c0", "g0")
        world.submit(A)
        for step in steps:
            getattr(world, step)("a")
        world.succeed(4, A)
        for step in ["compute_context", "reserve", "activate", "finish"][len(steps) :]:
            getattr(world, step)("a")
        world.assert_idle()
        assert (world.counter("adopted"), world.counter("completed")) == (1, 1), steps
        assert _kinds(world, "c0").count(RunContext) == 1
        assert _kinds(world, "g0").count(OfferGeneration) == 1


def test_a_report_that_the_dead_term_never_heard_is_no_loss() -> None:
    world = CentralWorld("c0", "g0")
    world.submit(A)
    worker = world.workers["c0"]
    worker.finish_context(world.attempt("c0", "a"))
    worker.reports.clear()  # it was on its way when the central scheduler died
    world.succeed(4, A)
    world.reserve("a")
    world.activate("a")
    world.finish("a")
    world.assert_idle()
    assert world.counter("adopted") == 1


def test_a_generation_first_reservation_is_adopted_with_its_context_and_its_ticket_delivered_again() -> None:
    world = CentralWorld("c0", "g0", config=CentralConfig(dispatch=DispatchPolicy.GENERATION_FIRST))
    world.submit(A)
    world.reserve("a")
    worker = world.workers["c0"]
    worker.finish_context(world.attempt("c0", "a"))
    worker.reports.clear()
    world.succeed(4, A)
    assert _kinds(world, "g0").count(DeliverHandoff) == 1
    world.activate("a")
    world.finish("a")
    world.assert_idle()


def test_half_an_attempt_is_cancelled_and_its_request_begins_again() -> None:
    world = CentralWorld("c0", "c1", "g0")
    world.submit(A)
    world.compute_context("a")
    del world.workers["c0"]  # it dies with the central scheduler, the offer stands
    world.succeed(4, A)
    assert world.central.health() == (False, "term 4 is asking workers and doors what runs")
    world.advance(1.6)
    assert world.counter("orphans") == 1
    world.compute_context("a", "c1")
    world.reserve("a")
    world.activate("a")
    world.finish("a")
    world.assert_idle()


def test_what_no_door_claims_is_cancelled_everywhere() -> None:
    world = CentralWorld("c0", "g0")
    world.submit(A, B)
    world.compute_context("a")
    world.reserve("a")
    world.activate("a")
    world.succeed(4)
    for name in world.workers:
        world.do(name, lambda worker: None)
    assert world.workers["c0"].parts == world.workers["g0"].parts == {}
    world.assert_idle()
    assert world.counter("orphans") == 2


def test_a_queued_request_that_a_door_claims_is_dispatched_anew() -> None:
    world = CentralWorld("c0", "g0", config=CentralConfig(max_running_per_context_worker=1))
    world.submit(A, B)
    world.succeed(4, A, B)
    assert world.central.state(world.now_s)["central"]["queued"] == 1
    for uid in ("a", "b"):
        world.compute_context(uid)
        world.reserve(uid)
        world.activate(uid)
        world.finish(uid)
    world.assert_idle()


def test_nothing_is_dispatched_before_every_live_worker_and_door_has_answered() -> None:
    world = CentralWorld("c0", "g0")
    world.unreachable = {"g0"}
    world.succeed(4)
    world.submit(A)
    for _ in range(6):
        world.advance(0.5)  # g0 beats, and is waited for
        assert _kinds(world, "c0") == []
    world.unreachable = set()
    world.advance(0.5)
    assert _kinds(world, "c0") == [RunContext]
    assert world.counter("takeovers") == 1


def test_a_worker_that_never_answers_is_waited_for_no_longer_than_the_timeout() -> None:
    world = CentralWorld("c0", "g0", config=CentralConfig(takeover_timeout_s=3.0))
    world.unreachable = {"g0"}
    world.succeed(4)
    world.submit(A)
    for _ in range(5):
        world.advance(0.5)
    assert _kinds(world, "c0") == []
    world.advance(0.5)
    assert _kinds(world, "c0") == [RunContext]


def test_reports_that_come_before_the_claims_count_once_they_are_there() -> None:
    world = CentralWorld("c0", "g0")
    world.submit(A)
    world.succeed(4, is_door_slow=True)
    world.compute_context("a")
    world.central.claim(DOOR, [A], world.now_s)
    world.deliver()
    world.reserve("a")
    world.activate("a")
    world.finish("a")
    world.assert_idle()
    assert world.counter("adopted") == 1


def test_commands_of_a_term_that_was_succeeded_are_refused_and_counted() -> None:
    world = CentralWorld("c0", "g0")
    dead = world.succeed(4)
    dead.submit(DOOR, [A], world.now_s)  # it was stopped, and wakes up
    alive, world.central = world.central, dead
    world.deliver()
    world.central = alive
    assert world.workers["c0"].parts == {}
    assert world.workers["c0"].refused_terms == 1


def test_a_term_rises_above_what_workers_know_and_yields_to_one_that_it_learns_of_too_late() -> None:
    world = CentralWorld("c0", "g0")
    world.workers["c0"].term = Term(9)
    world.succeed(4)
    assert world.central.state(world.now_s)["central"]["term"] == 10
    assert not world.central.is_superseded
    world.workers["g0"].term = Term(12)
    late = world.workers["g0"].introduce(Term(0))
    world.central.introduce(late, world.now_s)
    assert world.central.is_superseded


def test_a_full_queue_refuses_what_is_new_and_never_what_a_door_claims() -> None:
    config = CentralConfig(max_queued_requests=1, max_running_per_context_worker=1)
    world = CentralWorld("c0", "g0", config=config)
    world.submit(A)
    world.succeed(4, A, B, make_spec("c"))
    (refused,) = world.submit(make_spec("d")).refused
    assert refused.kind is ErrorKind.QUEUE_FULL
    assert world.central.state(world.now_s)["central"]["queued"] == 2


def test_a_heartbeat_of_an_unknown_life_asks_for_an_introduction_and_one_of_a_fenced_life_does_not() -> None:
    world = CentralWorld("c0", "g0")
    world.central.worker_lost(world.workers["c0"].name, "hung", world.now_s)
    world.advance(0.1)
    assert list(world.central.lost_workers()) == ["c0"]
    world.succeed(4)
    world.advance(0.1)
    assert world.central.lost_workers() == {}
