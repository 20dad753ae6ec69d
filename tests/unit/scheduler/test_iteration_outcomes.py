"""Cancels, failures, receives and leases (C5, C8 of the catalogue; M7)."""

from collections.abc import Callable

import pytest

from manager import LeaseId, RequestId
from scheduler.admission import TransferAdmission
from scheduler.errors import InvalidRequest, RequestTooLarge
from scheduler.messages import WorkerRole
from scheduler.request import Request
from scheduler.spec import AttemptId
from scheduler.states import AttemptEvent, AttemptState
from tests.fakes.attempts import make_spec, state_of
from tests.fakes.iteration_worker import IterationWorker, make_worker


def is_at_baseline(worker: IterationWorker) -> bool:
    availability = worker.manager.availability()
    stats = worker.manager.stats()
    return (
        dict(availability.pages) == dict(worker.scheduler._shape.total_pages)
        and stats.index_slots_free == stats.index_slots_total
    )


def waiting(worker: IterationWorker) -> Request:
    return worker.context(make_spec("x", 7))


def between_chunks(worker: IterationWorker) -> Request:
    request = worker.context(make_spec("x", 40))
    worker.step()
    return request


def decoding(worker: IterationWorker) -> Request:
    request = worker.context(make_spec("x", 7))
    worker.step()
    return request


def offered(worker: IterationWorker) -> Request:
    return worker.offer(make_spec("x", 7))


STATES_WITHOUT_READS = [waiting, between_chunks, decoding, offered]


@pytest.mark.parametrize("reach", STATES_WITHOUT_READS)
def test_a_cancel_releases_everything_and_is_terminal_once(reach: Callable[[IterationWorker], Request]) -> None:
    worker = make_worker()
    request = reach(worker)
    assert worker.scheduler.cancel(request.attempt_id, 1.0) is request
    assert state_of(request) is AttemptState.CANCELLED
    assert worker.scheduler.cancel(request.attempt_id, 1.0) is None
    assert worker.scheduler.get(request.attempt_id) is None
    assert not worker.scheduler.running
    assert not worker.scheduler.waiting
    assert is_at_baseline(worker)
    assert not worker.scheduler.has_work


@pytest.mark.parametrize("reach", STATES_WITHOUT_READS)
def test_a_failure_ends_like_a_cancel_but_says_so(reach: Callable[[IterationWorker], Request]) -> None:
    worker = make_worker()
    request = reach(worker)
    assert worker.scheduler.fail(request.attempt_id, 1.0) is request
    assert state_of(request) is AttemptState.FAILED
    assert is_at_baseline(worker)


def test_an_unknown_attempt_is_no_error_to_cancel() -> None:
    assert make_worker().scheduler.cancel(AttemptId("9.9"), 0.0) is None


def test_a_cancelled_receive_keeps_its_pages_until_nothing_is_written_any_more() -> None:
    window = TransferAdmission(5000)
    worker = make_worker(WorkerRole.GENERATION, window=window)
    request = worker.offer(make_spec("x", 15))
    worker.step()
    worker.scheduler.cancel(request.attempt_id, 0.0)
    assert state_of(request) is AttemptState.CANCELLED
    assert not is_at_baseline(worker)
    assert window.taken_bytes == 1000
    assert worker.scheduler.on_receive_ended(request.request_id, 0.0) is None
    assert is_at_baseline(worker)
    assert window.taken_bytes == 0


def test_a_transfer_that_arrives_after_the_cancel_is_not_activated() -> None:
    worker = make_worker(WorkerRole.GENERATION)
    request = worker.offer(make_spec("x", 15))
    worker.step()
    worker.scheduler.cancel(request.attempt_id, 0.0)
    assert worker.receive(request) is None
    assert state_of(request) is AttemptState.CANCELLED
    assert is_at_baseline(worker)


def test_a_failed_receive_fails_the_attempt_and_returns_its_pages() -> None:
    worker = make_worker(WorkerRole.GENERATION)
    request = worker.offer(make_spec("x", 15))
    worker.step()
    assert worker.scheduler.on_receive_ended(request.request_id, 0.0) is request
    assert state_of(request) is AttemptState.FAILED
    assert is_at_baseline(worker)


def test_late_signals_change_nothing_and_are_counted() -> None:
    worker = make_worker(WorkerRole.GENERATION)
    assert worker.scheduler.on_received(RequestId("1.1"), 5, 0.0) is None
    assert worker.scheduler.on_receive_ended(RequestId("1.1"), 0.0) is None
    assert worker.scheduler.on_lease_ended(LeaseId(77), 0.0, settled=True) is None
    assert worker.scheduler.counters()["late_signals"] == 3


@pytest.mark.parametrize(
    ("settled", "state"), [(True, AttemptState.DISAGG_CONTEXT_COMPLETE), (False, AttemptState.FAILED)]
)
def test_a_leased_context_holds_its_pages_until_its_lease_ends(*, settled: bool, state: AttemptState) -> None:
    worker = make_worker(WorkerRole.CONTEXT)
    request = worker.context(make_spec("x", 15))
    worker.step()
    assert state_of(request) is AttemptState.DISAGG_CONTEXT_TRANS_IN_PROGRESS
    assert not worker.manager.has_cache(request.request_id)
    assert not is_at_baseline(worker)
    assert worker.scheduler.running == [request]
    assert worker.scheduler.on_lease_ended(worker.leases["x"], 0.0, settled=settled) is request
    assert state_of(request) is state
    assert is_at_baseline(worker)
    assert not worker.scheduler.running


def test_a_cancelled_leased_context_keeps_its_lease_and_its_end_is_not_a_second_terminal_event() -> None:
    worker = make_worker(WorkerRole.CONTEXT)
    request = worker.context(make_spec("x", 15))
    worker.step()
    worker.scheduler.cancel(request.attempt_id, 0.0)
    assert not is_at_baseline(worker)
    assert worker.scheduler.on_lease_ended(worker.leases["x"], 0.0, settled=False) is request
    assert request.history[-1].event is AttemptEvent.CANCEL
    assert is_at_baseline(worker)


def test_a_request_larger_than_the_pool_is_refused_on_arrival_with_the_numbers() -> None:
    worker = make_worker(num_pages=4, max_sequences=2)
    with pytest.raises(RequestTooLarge, match="needs 17 tokens, this worker can hold 16"):
        worker.context(make_spec("x", 9, max_tokens=8))
    assert not worker.scheduler.has_work


def test_a_context_worker_is_asked_for_the_prompt_only() -> None:
    worker = make_worker(WorkerRole.CONTEXT, num_pages=4, max_sequences=2)
    worker.context(make_spec("x", 16, max_tokens=500))
    assert len(worker.step().contexts) == 1


def test_an_attempt_cannot_arrive_twice() -> None:
    worker = make_worker()
    worker.context(make_spec("x"))
    with pytest.raises(InvalidRequest, match="here already"):
        worker.context(make_spec("x"))


def test_a_context_worker_takes_no_offers() -> None:
    with pytest.raises(InvalidRequest, match="takes no offers"):
        make_worker(WorkerRole.CONTEXT).offer(make_spec("x"))
