"""Offers: taken whole, or deferred without a trace (C1, C2, B5, B16)."""

from configs import SchedulerConfig, SchedulingPolicy
from scheduler.admission import TransferAdmission, TransferWindow
from scheduler.messages import WorkerRole
from scheduler.states import AttemptEvent, AttemptState
from tests.fakes.attempts import make_handoff, make_spec, state_of
from tests.fakes.iteration_worker import IterationWorker, make_worker


def generation_worker(
    num_pages: int = 8,
    *,
    max_sequences: int = 8,
    config: SchedulerConfig | None = None,
    window: TransferWindow | None = None,
) -> IterationWorker:
    return make_worker(
        WorkerRole.GENERATION, num_pages=num_pages, max_sequences=max_sequences, config=config, window=window
    )


def reasons(worker: IterationWorker) -> list[tuple[str, str]]:
    return [(request.attempt_id, deferral.reason) for request, deferral in worker.outputs[-1].deferred]


def test_an_offer_becomes_a_reservation_and_decodes_once_received() -> None:
    worker = generation_worker()
    request = worker.offer(make_spec("a", 7, max_tokens=3))
    assert worker.step().reserved == (request,)
    assert state_of(request) is AttemptState.DISAGG_GENERATION_TRANS_IN_PROGRESS
    assert not worker.step().has_step
    worker.receive(request)
    assert worker.step().generations == (request,)
    worker.run_until_idle()
    assert len(worker.tokens["a"]) == 2
    assert state_of(request) is AttemptState.GENERATION_COMPLETE


def test_activation_takes_no_page_that_the_reservation_did_not_hold() -> None:
    worker = generation_worker()
    request = worker.offer(make_spec("a", 7, max_tokens=8))
    worker.step()
    before = worker.manager.availability()
    worker.receive(request)
    assert worker.manager.availability() == before
    assert worker.step().generations == (request,)
    assert worker.manager.availability() == before


def test_a_deferred_offer_leaves_the_manager_as_it_was_and_is_answered_once() -> None:
    worker = generation_worker(num_pages=5)
    worker.admit_generation(make_spec("running", 11, max_tokens=6))
    offered = worker.offer(make_spec("offer", 7, max_tokens=4))
    while_running = worker.schedule()
    before = worker.manager.snapshot()
    assert reasons(worker) == [("offer", "growth_reserve")]
    assert worker.manager.snapshot() == before
    assert offered.history[-1].event is AttemptEvent.DEFERRED
    assert worker.scheduler.get(offered.attempt_id) is None
    assert not worker.manager.has_cache(offered.request_id)
    worker.complete(while_running)
    assert not worker.step().deferred


def test_a_pass_of_deferrals_only_leaves_the_manager_bit_identical() -> None:
    worker = generation_worker(num_pages=5)
    held = worker.offer(make_spec("held", 12, max_tokens=4))
    worker.step()
    worker.offer(make_spec("offer", 7, max_tokens=4))
    before = worker.manager.snapshot()
    assert len(worker.step().deferred) == 1
    assert worker.manager.snapshot() == before
    worker.receive(held)
    worker.run_until_idle()


def test_the_first_deferral_defers_every_later_offer_even_one_that_would_fit() -> None:
    worker = generation_worker(num_pages=8)
    for name, prompt in (("fits", 11), ("large", 24), ("small", 2)):
        worker.offer(make_spec(name, prompt, max_tokens=2))
    output = worker.step()
    assert [request.attempt_id for request in output.reserved] == ["fits"]
    assert reasons(worker) == [("large", "out_of_pages"), ("small", "older_request_waits")]
    assert output.deferred[0][1].needed > output.deferred[0][1].available > 0


def test_an_offer_leaves_a_block_of_growth_for_every_running_request() -> None:
    worker = generation_worker(num_pages=6)
    worker.admit_generation(make_spec("running", 7, max_tokens=12))
    worker.offer(make_spec("offer", 15, max_tokens=2))
    worker.step()
    assert reasons(worker) == [("offer", "growth_reserve")]
    worker.run_until_idle()
    assert sum(output.num_recomputed for output in worker.outputs) == 0


def test_an_offer_that_fills_an_idle_pool_exactly_is_taken() -> None:
    worker = generation_worker(num_pages=4)
    worker.admit_generation(make_spec("whole", 12, max_tokens=4))
    worker.run_until_idle()
    assert len(worker.tokens["whole"]) == 3


def test_the_transfer_window_is_part_of_the_same_attempt() -> None:
    window = TransferAdmission(1500)
    worker = generation_worker(window=window)
    first = worker.offer(make_spec("first", 3, max_tokens=4))
    worker.offer(make_spec("second", 3, max_tokens=4))
    before_second = worker.step()
    assert before_second.reserved == (first,)
    assert reasons(worker) == [("second", "transfer_window")]
    assert window.taken_bytes == 1000
    assert worker.manager.stats().index_slots_free == worker.manager.stats().index_slots_total - 1
    worker.receive(first)
    assert window.taken_bytes == 0


def test_a_transfer_larger_than_the_window_goes_alone() -> None:
    worker = generation_worker(window=TransferAdmission(1500))
    small = worker.offer(make_spec("small", 3, max_tokens=4))
    worker.offer(make_spec("huge", 3, max_tokens=4), make_handoff(total_bytes=9000))
    worker.step()
    assert reasons(worker) == [("huge", "transfer_window")]
    worker.receive(small)
    again = worker.offer(make_spec("huge", 3, max_tokens=4), make_handoff(total_bytes=9000))
    assert worker.step().reserved == (again,)


def test_a_full_batch_defers_before_any_page_is_asked_for() -> None:
    worker = generation_worker(max_sequences=1)
    worker.admit_generation(make_spec("a", 3, max_tokens=4))
    worker.offer(make_spec("b", 3, max_tokens=4))
    worker.step()
    assert reasons(worker) == [("b", "batch_full")]


def test_no_offer_passes_a_context_that_could_not_run() -> None:
    worker = generation_worker(num_pages=5)
    running = worker.admit_generation(make_spec("running", 7, max_tokens=10))
    context = worker.context(make_spec("context", 12, max_tokens=2))
    assert not worker.step().contexts
    worker.offer(make_spec("offer", 2, max_tokens=2))
    worker.step()
    assert reasons(worker) == [("offer", "older_request_waits")]
    worker.run_until_idle()
    assert worker.finished == [running, context]


def test_guaranteed_no_evict_admits_only_what_can_reach_its_last_token() -> None:
    config = SchedulerConfig(
        max_num_tokens=32, max_batch_size=4, chunk_unit_tokens=4, policy=SchedulingPolicy.GUARANTEED_NO_EVICT
    )
    worker = generation_worker(num_pages=8, config=config)
    worker.offer(make_spec("a", 4, max_tokens=12))
    worker.offer(make_spec("b", 4, max_tokens=12))
    worker.offer(make_spec("c", 2, max_tokens=2))
    output = worker.step()
    assert [request.attempt_id for request in output.reserved] == ["a", "b"]
    assert reasons(worker) == [("c", "worst_case_exceeds_pool")]
    for request in output.reserved:
        worker.receive(request)
    worker.run_until_idle()
    assert sum(o.num_recomputed + o.num_suspended for o in worker.outputs) == 0


def test_room_is_reported_once_after_a_deferral_and_a_release() -> None:
    worker = generation_worker(max_sequences=1)
    running = worker.admit_generation(make_spec("a", 3, max_tokens=3))
    assert not worker.scheduler.take_room_report()
    worker.offer(make_spec("b", 3, max_tokens=4))
    worker.step()
    assert reasons(worker) == [("b", "batch_full")]
    assert not worker.scheduler.take_room_report()
    worker.run_until_idle()
    assert state_of(running) is AttemptState.GENERATION_COMPLETE
    assert worker.scheduler.take_room_report()
    assert not worker.scheduler.take_room_report()
