"""The ledger against the workers' accounts (C6): counted, returned and repaired; no false alarm."""

import pytest

from scheduler.messages import CancelAttempt, Finished, ReportBatch
from scheduler.reconcile import DivergenceKind
from scheduler.spec import Term
from tests.fakes.central_world import CentralWorld, make_spec


def _beat(world: CentralWorld, name: str, times: int = 1) -> None:
    for _ in range(times):
        world.workers[name].beat()
        world.receive(world.workers[name])


def _lose_reports(world: CentralWorld, name: str) -> None:
    world.workers[name].flush()
    world.workers[name].outgoing.clear()


def test_a_lost_finish_is_found_on_the_second_heartbeat_and_the_door_goes_on() -> None:
    world = CentralWorld("m0")
    world.submit(make_spec("a"))
    worker = world.workers["m0"]
    worker.finish(world.attempt("m0", "a"))
    _lose_reports(world, "m0")
    _beat(world, "m0")
    assert world.divergences == []
    _beat(world, "m0")
    assert [divergence.kind for divergence in world.divergences] == [DivergenceKind.MISSING]
    assert world.counter("divergences") == 1
    assert [notice.retriable for notice in world.notices] == [True]
    world.assert_idle()


def test_a_difference_that_a_report_explains_before_the_second_heartbeat_is_none() -> None:
    world = CentralWorld("m0")
    world.submit(make_spec("a"))
    worker = world.workers["m0"]
    worker.finish(world.attempt("m0", "a"))
    worker.flush()
    late = worker.outgoing.pop()
    assert isinstance(late, ReportBatch)
    assert isinstance(late.reports[0], Finished)
    _beat(world, "m0")
    worker.outgoing.append(late)
    _beat(world, "m0", times=3)
    assert world.divergences == []
    assert world.counter("completed") == 1
    world.assert_idle()


def test_an_account_made_before_the_worker_read_the_command_proves_nothing() -> None:
    world = CentralWorld("c0", "g0")
    worker = world.workers["c0"]
    world.submit(make_spec("a"))
    stale = dict(worker.parts)
    worker.parts.clear()
    worker.commands_seen = None
    _beat(world, "c0", times=5)
    worker.commands_seen = (Term(2), 99)
    _beat(world, "c0", times=5)
    assert world.divergences == []
    worker.parts |= stale
    worker.commands_seen = (Term(3), 1)
    _beat(world, "c0", times=5)
    assert world.divergences == []


def test_a_worker_that_does_not_say_what_it_has_read_is_given_time() -> None:
    world = CentralWorld("c0", "g0")
    world.submit(make_spec("a"))
    worker = world.workers["c0"]
    worker.parts.clear()
    worker.commands_seen = None
    for _ in range(19):
        world.advance(0.5)
    assert world.divergences == []
    for _ in range(3):
        world.advance(0.5)
    assert [divergence.kind for divergence in world.divergences] == [DivergenceKind.MISSING]


def test_a_worker_in_a_step_that_began_before_the_command_has_not_lost_it() -> None:
    world = CentralWorld("c0", "g0")
    world.advance(0.5)
    worker = world.workers["c0"]
    world.submit(make_spec("a"))
    parts = dict(worker.parts)
    worker.parts.clear()
    worker.commands_seen = None
    for step in range(24):
        worker.busy_s = 0.5 * (step + 1)
        worker.iteration += 1  # that a step without end is a hang is not in question here
        world.advance(0.5)
    assert world.divergences == []
    worker.parts |= parts
    worker.busy_s = 0.0
    world.advance(0.5)
    world.advance(0.5)
    assert world.divergences == []
    assert world.counter("retries") == 0


def test_a_lost_context_command_is_given_again_under_a_new_name() -> None:
    world = CentralWorld("c0", "g0")
    world.submit(make_spec("a"))
    worker = world.workers["c0"]
    lost = world.attempt("c0", "a")
    del worker.parts[lost]
    _beat(world, "c0", times=2)
    assert world.attempt("c0", "a") != lost
    assert world.counter("retries") == 1
    assert world.load("c0") == (1, 10)


def test_an_attempt_that_nobody_gave_is_cancelled() -> None:
    world = CentralWorld("c0", "g0")
    worker = world.workers["g0"]
    other = CentralWorld("c0", "g0", term=2)
    other.submit(make_spec("a"))
    other.compute_context("a")
    worker.parts |= other.workers["g0"].parts
    worker.specs |= other.workers["g0"].specs
    _beat(world, "g0", times=2)
    assert [divergence.kind for divergence in world.divergences] == [DivergenceKind.STRANGER]
    assert world.commands("g0") == [CancelAttempt(divergence.attempt_id) for divergence in world.divergences]
    assert worker.parts == {}
    world.do("g0", lambda worker: None)
    _beat(world, "g0", times=3)
    assert len(world.divergences) == 1


def test_a_lost_cancel_is_sent_again() -> None:
    world = CentralWorld("m0")
    world.submit(make_spec("a"))
    worker = world.workers["m0"]
    parts = dict(worker.parts)
    world.cancel("a")
    worker.parts |= parts
    worker.reports.clear()
    _beat(world, "m0", times=2)
    assert [divergence.kind for divergence in world.divergences] == [DivergenceKind.STILL_HELD]
    assert worker.parts == {}
    world.do("m0", lambda worker: None)
    world.assert_idle()


def test_a_lost_answer_to_a_cancel_does_not_leave_the_load_counter_drifted() -> None:
    world = CentralWorld("m0")
    world.submit(make_spec("a"))
    world.cancel("a")
    _lose_reports(world, "m0")
    world.workers["m0"].reports.clear()
    assert world.load("m0") == (1, 15)
    _beat(world, "m0", times=2)
    world.assert_idle()
    assert world.counter("divergences") == 1
    assert world.notices == []


@pytest.mark.parametrize("is_listed", [True, False])
def test_a_leased_context_may_be_listed_or_not(*, is_listed: bool) -> None:
    world = CentralWorld("c0", "g0")
    world.submit(make_spec("a"))
    world.compute_context("a")
    worker = world.workers["c0"]
    if not is_listed:
        worker.parts.clear()
    _beat(world, "c0", times=5)
    assert world.divergences == []
    # Listed or not, a cancel reaches the lease.
    world.cancel("a")
    assert isinstance(world.commands("c0")[-1], CancelAttempt)
