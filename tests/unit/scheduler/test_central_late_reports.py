"""Reports out of turn: they move no request, and pages held for nobody are given back."""

import pytest

from manager import LeaseId
from scheduler.errors import IllegalTransition
from scheduler.messages import (
    Activated,
    CancelAttempt,
    Cancelled,
    ContextDone,
    Deferred,
    ErrorKind,
    Finished,
    LeaseEnded,
    ReportBatch,
    Reserved,
    WorkerReport,
)
from scheduler.spec import AttemptId, FinishReason
from scheduler.tracked_request import Phase, TrackedRequest
from tests.fakes.central_world import DOOR, CentralWorld, make_spec

NOBODY = AttemptId("2.7")


def _report(world: CentralWorld, name: str, report: WorkerReport) -> None:
    worker = world.workers[name]
    world.central.reports(ReportBatch(worker.name, worker.epoch, (report,)), world.now_s)
    world.deliver()


@pytest.mark.parametrize("report", [ContextDone(NOBODY, None), Reserved(NOBODY), Activated(NOBODY)])
def test_a_worker_that_holds_pages_for_nobody_is_told_to_release_them(report: WorkerReport) -> None:
    world = CentralWorld("c0", "g0")
    _report(world, "g0", report)
    assert world.commands("g0") == [CancelAttempt(NOBODY)]
    assert world.counter("late_reports") == 1


@pytest.mark.parametrize("report", [Cancelled(NOBODY), LeaseEnded(NOBODY, LeaseId(1), settled=True)])
def test_what_rightly_follows_an_end_is_not_counted_as_late(report: WorkerReport) -> None:
    world = CentralWorld("c0", "g0")
    _report(world, "c0", report)
    assert world.commands("c0") == []
    assert world.counter("late_reports") == 0


def test_reports_that_the_phase_does_not_know_leave_the_request_where_it_is() -> None:
    world = CentralWorld("c0", "g0")
    world.submit(make_spec("a"))
    context_attempt = world.attempt("c0", "a")
    _report(world, "c0", LeaseEnded(context_attempt, LeaseId(1), settled=False))
    assert world.load("c0") == (1, 10)
    world.compute_context("a")
    _report(world, "c0", ContextDone(context_attempt, None))
    _report(world, "g0", Activated(context_attempt))
    assert world.load("g0") == (1, 15)
    world.reserve("a")
    _report(world, "g0", Deferred(context_attempt, "device_pages", 1, 0))
    _report(world, "g0", Reserved(context_attempt))
    assert world.load("g0") == (1, 15)
    world.activate("a")
    world.finish("a")
    world.assert_idle()
    assert world.counter("late_reports") == 5
    assert world.counter("deferrals") == 0


def test_a_finish_cannot_come_before_the_context() -> None:
    world = CentralWorld("c0", "g0")
    world.submit(make_spec("a"))
    attempt_id = world.attempt("c0", "a")
    _report(world, "c0", Finished(attempt_id, FinishReason.STOP))
    assert world.counter("completed") == 0
    assert world.load("c0") == (1, 10)


def test_an_attempt_that_its_worker_dropped_unasked_goes_on_elsewhere() -> None:
    world = CentralWorld("c0", "c1", "g0")
    world.submit(make_spec("a"))
    worker, attempt_id = world.workers["c0"], world.attempt("c0", "a")
    del worker.parts[attempt_id]
    _report(world, "c0", Cancelled(attempt_id))
    world.compute_context("a", "c1")
    _report(world, "g0", Cancelled(world.attempt("g0", "a")))
    assert [(notice.kind, notice.retriable) for notice in world.notices] == [(ErrorKind.INTERNAL, True)]


def test_a_phase_that_the_table_does_not_allow_is_refused_and_changes_nothing() -> None:
    request = TrackedRequest(make_spec("a"), DOOR, (1, 1), 0.0, Phase.WAITING_CONTEXT)
    with pytest.raises(IllegalTransition, match="cannot enter generation"):
        request.enter(Phase.GENERATION)
    assert request.phase is Phase.WAITING_CONTEXT
