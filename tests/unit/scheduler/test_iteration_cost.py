"""What a pass costs does not grow with the requests that cannot run (S6)."""

from collections import Counter

import pytest

from configs import SchedulerConfig
from manager import KVCacheManager
from scheduler.messages import WorkerRole
from tests.fakes.attempts import make_spec
from tests.fakes.call_log import CallLog
from tests.fakes.iteration_worker import IterationWorker, make_worker


def blocked_worker(num_waiting: int, *, shared_prefix: bool = False) -> tuple[IterationWorker, CallLog]:
    """Two decodes hold the pool; everybody else waits."""
    logs: list[CallLog] = []

    def log(manager: KVCacheManager) -> KVCacheManager:
        logs.append(CallLog(manager))
        return logs[0]

    worker = make_worker(num_pages=8, wrap=log)
    for name in ("one", "two"):
        worker.context(make_spec(name, 12, max_tokens=4))
    worker.step()
    for number in range(num_waiting):
        prompt = tuple(range(20)) if shared_prefix else 20
        worker.context(make_spec(f"w{number}", prompt, max_tokens=4))
    return worker, logs[0]


def calls_of_a_pass(num_waiting: int) -> Counter[str]:
    worker, log = blocked_worker(num_waiting)
    log.calls.clear()
    worker.schedule()
    return Counter(log.calls)


def test_a_pass_makes_the_same_calls_for_ten_and_for_thousands_of_blocked_requests() -> None:
    assert calls_of_a_pass(3000) == calls_of_a_pass(10)


def test_blocked_requests_cost_at_most_one_refused_attempt() -> None:
    without, with_ten = calls_of_a_pass(0), calls_of_a_pass(10)
    assert with_ten["prepare_context"] - without["prepare_context"] <= 1
    assert with_ten["resize_context"] - without["resize_context"] <= 1
    assert with_ten["try_allocate_generation"] == without["try_allocate_generation"]


@pytest.mark.parametrize("num_waiting", [20, 200])
def test_a_pass_looks_at_no_more_duplicates_than_a_batch_has_seats(num_waiting: int) -> None:
    config = SchedulerConfig(max_num_tokens=64, max_batch_size=4, chunk_unit_tokens=4)
    worker = make_worker(WorkerRole.CONTEXT, num_pages=32, config=config)
    for number in range(num_waiting):
        worker.context(make_spec(f"d{number}", (*range(12), number)))
    assert len(worker.step().contexts) == 1
    assert worker.scheduler.counters()["duplicate_deferrals"] == 3
