"""Closing a step: complete, abandon, and calls out of turn (V22, I10)."""

import pytest

from scheduler.errors import CallOutOfTurn
from scheduler.messages import WorkerRole
from scheduler.output import DrawnToken
from scheduler.spec import FinishReason
from scheduler.states import AttemptEvent, AttemptState
from tests.fakes.attempts import make_spec, state_of
from tests.fakes.iteration_worker import make_worker


def test_a_finished_context_is_leased_with_all_its_tokens_and_holds_no_index_slot() -> None:
    worker = make_worker(WorkerRole.CONTEXT)
    request = worker.context(make_spec("x", 15))
    completed = worker.complete(worker.schedule())
    [(leased, lease)] = completed.leases
    assert leased is request
    assert lease.num_tokens == 15
    assert [position for _, position, _ in completed.tokens] == [0]
    assert worker.manager.stats().index_slots_free == worker.manager.stats().index_slots_total


def test_a_context_ended_by_its_first_token_is_never_leased() -> None:
    worker = make_worker(WorkerRole.CONTEXT)
    request = worker.context(make_spec("x", 15, max_tokens=1))
    completed = worker.complete(worker.schedule())
    assert not completed.leases
    assert completed.finished == (request,)
    assert request.history[-1].event is AttemptEvent.FINISHED_BY_FIRST_TOKEN
    assert state_of(request) is AttemptState.DISAGG_CONTEXT_COMPLETE


@pytest.mark.parametrize("role", [WorkerRole.MIXED, WorkerRole.GENERATION])
def test_a_context_computed_here_goes_on_to_decode(role: WorkerRole) -> None:
    worker = make_worker(role)
    request = worker.context(make_spec("x", 6, max_tokens=3))
    worker.step()
    assert state_of(request) is AttemptState.GENERATION_IN_PROGRESS
    worker.run_until_idle()
    assert state_of(request) is AttemptState.GENERATION_COMPLETE
    assert len(worker.tokens["x"]) == 3


def test_a_context_computed_here_and_ended_by_its_first_token_is_complete() -> None:
    worker = make_worker()
    request = worker.context(make_spec("x", 6, max_tokens=1))
    worker.step()
    assert state_of(request) is AttemptState.GENERATION_COMPLETE


def test_a_resubmitted_request_computes_its_accepted_tokens_and_draws_the_next_position() -> None:
    worker = make_worker()
    worker.context(make_spec("x", 6, max_tokens=5, accepted=(901, 902)))
    output = worker.schedule()
    assert output.contexts[0].num_tokens == 8
    completed = worker.complete(output)
    assert [position for _, position, _ in completed.tokens] == [2]
    worker.run_until_idle()
    assert len(worker.tokens["x"]) == 3


def test_a_failed_step_moves_no_history_and_its_requests_run_again() -> None:
    worker = make_worker()
    first = worker.context(make_spec("first", 6))
    worker.step()
    second = worker.context(make_spec("second", 6))
    output = worker.schedule()
    before = worker.manager.snapshot()
    abandoned = worker.abandon(output)
    assert set(abandoned.retried) == {first, second}
    assert not abandoned.failed
    assert worker.manager.snapshot() == before
    again = worker.schedule()
    assert (again.generations, again.contexts) == (output.generations, output.contexts)
    assert worker.manager.snapshot() == before


def test_a_request_fails_when_its_steps_fail_too_often_in_a_row() -> None:
    worker = make_worker()
    request = worker.context(make_spec("x", 6))
    worker.abandon(worker.schedule())
    abandoned = worker.abandon(worker.schedule())
    assert abandoned.failed == (request,)
    assert state_of(request) is AttemptState.FAILED
    assert not worker.manager.has_cache(request.request_id)
    assert worker.scheduler.counters()["abandoned_steps"] == 2


def test_a_successful_step_forgives_an_earlier_failure() -> None:
    worker = make_worker()
    worker.context(make_spec("x", 6))
    worker.abandon(worker.schedule())
    worker.step()
    assert not worker.abandon(worker.schedule()).failed


def test_a_request_cancelled_while_its_step_runs_is_passed_over() -> None:
    worker = make_worker()
    cancelled = worker.context(make_spec("cancelled", 6))
    other = worker.context(make_spec("other", 6))
    output = worker.schedule()
    worker.scheduler.cancel(cancelled.attempt_id, 0.0)
    completed = worker.complete(output)
    assert [request for request, _, _ in completed.tokens] == [other]
    assert state_of(cancelled) is AttemptState.CANCELLED


def test_a_missing_token_is_refused_and_the_step_stays_open() -> None:
    worker = make_worker()
    request = worker.context(make_spec("x", 6))
    output = worker.schedule()
    before = worker.manager.snapshot()
    with pytest.raises(CallOutOfTurn, match="no token was drawn for"):
        worker.scheduler.complete(output, {}, 0.0)
    assert worker.manager.snapshot() == before
    worker.scheduler.complete(output, {request.request_id: DrawnToken(5, FinishReason.STOP)}, 0.0)
    assert state_of(request) is AttemptState.GENERATION_COMPLETE


def test_passes_and_steps_take_turns() -> None:
    worker = make_worker()
    worker.context(make_spec("x", 6))
    output = worker.schedule()
    with pytest.raises(CallOutOfTurn, match="neither completed nor abandoned"):
        worker.schedule()
    worker.complete(output)
    with pytest.raises(CallOutOfTurn, match="not the open step"):
        worker.scheduler.abandon(output, 0.0)


def test_an_idle_worker_has_no_work_and_an_empty_pass_changes_nothing() -> None:
    worker = make_worker()
    assert not worker.scheduler.has_work
    before = worker.manager.snapshot()
    output = worker.schedule()
    assert (output.has_step, output.deadlock) == (False, None)
    assert worker.manager.snapshot() == before
