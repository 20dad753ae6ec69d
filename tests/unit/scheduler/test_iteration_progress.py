"""Everybody ends in a bounded number of passes, whatever keeps arriving (S5, B1, B15)."""

from collections.abc import Callable

import pytest

from configs import SchedulerConfig
from scheduler.messages import WorkerRole
from scheduler.request import Request
from scheduler.states import AttemptState
from tests.fakes.attempts import make_spec, state_of
from tests.fakes.iteration_worker import IterationWorker, drawn_token, make_worker

BOUND = 120


def passes_until_end(worker: IterationWorker, request: Request, arrive: Callable[[int], None]) -> int:
    """Passes until `request` ends while `arrive` adds something before each."""
    for count in range(BOUND):
        if request.is_terminal:
            return count
        arrive(count)
        for reserved in worker.step().reserved:
            worker.receive(reserved)
    pytest.fail(f"{request} has not ended after {BOUND} passes")


def test_a_stream_of_offers_does_not_starve_a_context_that_needs_the_pool() -> None:
    worker = make_worker(WorkerRole.GENERATION, num_pages=8)
    worker.admit_generation(make_spec("first", 7, max_tokens=12))
    large = worker.context(make_spec("large", 26, max_tokens=4))

    def arrive(count: int) -> None:
        worker.offer(make_spec(f"o{count}", 3, max_tokens=6))

    assert passes_until_end(worker, large, arrive) < BOUND
    assert sum(len(output.deferred) for output in worker.outputs) > 0


def test_a_stream_of_offers_does_not_starve_a_context_for_want_of_seats() -> None:
    config = SchedulerConfig(max_num_tokens=16, max_batch_size=2, chunk_unit_tokens=4)
    worker = make_worker(WorkerRole.GENERATION, num_pages=16, config=config)
    for name in ("a", "b"):
        worker.admit_generation(make_spec(name, 3, max_tokens=6))
    context = worker.context(make_spec("context", 8, max_tokens=3))
    passes = passes_until_end(
        worker, context, lambda count: void(worker.offer(make_spec(f"o{count}", 3, max_tokens=6)))
    )
    assert passes < BOUND


def void(_: object) -> None:
    """Drop a result."""


def test_a_stream_of_small_contexts_does_not_starve_a_large_one() -> None:
    worker = make_worker(num_pages=8)
    worker.context(make_spec("first", 7, max_tokens=12))
    worker.step()
    large = worker.context(make_spec("large", 26, max_tokens=4))
    passes = passes_until_end(
        worker, large, lambda count: void(worker.context(make_spec(f"s{count}", 2, max_tokens=3)))
    )
    assert passes < BOUND


@pytest.mark.parametrize("arrivals_per_priority", [0, 2, 10])
def test_a_stream_of_higher_priorities_overtakes_only_so_often(arrivals_per_priority: int) -> None:
    config = SchedulerConfig(
        max_num_tokens=4, max_batch_size=1, chunk_unit_tokens=4, arrivals_per_priority=arrivals_per_priority
    )
    worker = make_worker(num_pages=4, config=config)
    low = worker.context(make_spec("low", 4, max_tokens=2))
    overtaking: list[Request] = []

    def arrive(count: int) -> None:
        overtaking.append(worker.context(make_spec(f"h{count}", 4, max_tokens=2, priority=1)))

    passes_until_end(worker, low, arrive)
    finished_before = worker.finished.index(low)
    assert finished_before <= arrivals_per_priority


def test_a_storm_of_growing_decodes_always_advances_somebody() -> None:
    worker = make_worker(num_pages=9, max_sequences=6)
    for number in range(6):
        worker.context(make_spec(f"d{number}", 5, max_tokens=20))
    while worker.scheduler.has_work:
        worker.step()
        assert worker.outputs[-1].has_step
    assert [request.attempt_id for request in worker.finished] == [f"d{number}" for number in range(6)]
    assert sum(output.num_recomputed for output in worker.outputs) > 0


def test_the_oldest_is_never_pushed_out() -> None:
    worker = make_worker(num_pages=9, max_sequences=6)
    oldest = worker.context(make_spec("oldest", 5, max_tokens=20))
    for number in range(5):
        worker.context(make_spec(f"d{number}", 5, max_tokens=20))
    while not oldest.is_terminal:
        worker.step()
        assert state_of(oldest) in {AttemptState.GENERATION_IN_PROGRESS, AttemptState.GENERATION_COMPLETE}


@pytest.mark.parametrize("resume_watermark", [0.1, 0.5, 1.0])
@pytest.mark.parametrize("host_pages", [0, 3, 20])
def test_a_watermark_below_what_one_request_needs_keeps_nobody_out_for_ever(
    host_pages: int, resume_watermark: float
) -> None:
    worker = make_worker(num_pages=5, host_pages=host_pages, resume_watermark=resume_watermark)
    for name in ("old", "new"):
        worker.context(make_spec(name, 7, max_tokens=10))
    worker.run_until_idle()
    assert [request.attempt_id for request in worker.finished] == ["old", "new"]
    assert all(len(tokens) == 10 for tokens in worker.tokens.values())
    worker.manager.audit()


@pytest.mark.parametrize("host_pages", [3, 8, 20])
def test_decodes_that_come_and_go_through_the_host_tier_draw_the_same_tokens(host_pages: int) -> None:
    worker = make_worker(num_pages=9, max_sequences=6, host_pages=host_pages)
    for number in range(6):
        worker.context(make_spec(f"d{number}", 5, max_tokens=20))
    while worker.scheduler.has_work:
        worker.step()
        worker.manager.audit()
    for number in range(6):
        assert worker.tokens[f"d{number}"] == [drawn_token(f"d{number}", position) for position in range(20)]
