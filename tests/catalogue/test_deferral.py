"""A thousand offers that cannot be taken now: each leaves the manager as it was, and arrival decides who is taken."""

from collections import deque

import pytest

from configs import SchedulerConfig
from scheduler.admission import TransferAdmission
from scheduler.messages import WorkerRole
from tests.fakes.attempts import make_handoff, make_spec
from tests.fakes.iteration_worker import IterationWorker, make_worker

NUM_OFFERS = 1000
CONFIG = SchedulerConfig(max_num_tokens=64, max_batch_size=8, chunk_unit_tokens=4)


def _worker(*, by_window: bool) -> IterationWorker:
    window = TransferAdmission(2500) if by_window else None
    pages = 64 if by_window else 10
    return make_worker(WorkerRole.GENERATION, num_pages=pages, max_sequences=8, config=CONFIG, window=window)


@pytest.mark.parametrize("by_window", [True, False])
def test_each_of_a_thousand_deferred_offers_leaves_the_manager_identical(by_window: bool) -> None:
    worker = _worker(by_window=by_window)
    held = [worker.offer(make_spec(f"held{n}", 11, max_tokens=4)) for n in range(2)]
    assert list(worker.step().reserved) == held
    before = worker.manager.snapshot()
    reasons = set()
    for number in range(NUM_OFFERS):
        # Different lengths, so that the attempt gets to a different point each time.
        worker.offer(make_spec(f"late{number}", 9 + number % 7, max_tokens=4), make_handoff(total_bytes=1000))
        output = worker.step()
        ((request, deferral),) = output.deferred
        reasons.add(deferral.reason)
        assert request.attempt_id == f"late{number}"
        assert deferral.needed > deferral.available >= 0
        assert worker.manager.snapshot() == before
    assert reasons == ({"transfer_window"} if by_window else {"out_of_pages", "growth_reserve"} & reasons)
    assert worker.scheduler.counters()["deferrals"] == NUM_OFFERS
    worker.settle()


@pytest.mark.parametrize("by_window", [True, False])
def test_a_thousand_offers_are_taken_in_the_order_of_their_arrival(by_window: bool) -> None:
    worker = _worker(by_window=by_window)
    # The central scheduler's part: what was deferred waits in order of arrival and is offered again.
    line = deque(f"r{number}" for number in range(NUM_OFFERS))
    taken: list[str] = []
    receiving: deque[str] = deque()
    num_deferred = 0
    while line or receiving or worker.scheduler.has_work:
        offered = [line.popleft() for _ in range(min(4, len(line)))]
        for name in offered:
            number = int(name[1:])
            worker.offer(make_spec(name, 5 + number % 9, max_tokens=3), make_handoff(total_bytes=400 + number % 3000))
        output = worker.step()
        names = [request.spec.uid.removeprefix("uid-") for request, _ in output.deferred]
        line.extendleft(reversed(names))
        num_deferred += len(names)
        receiving.extend(request.attempt_id for request in output.reserved)
        taken += [request.attempt_id for request in output.reserved]
        if receiving and (not offered or names):
            request = worker.scheduler.get(receiving.popleft())  # type: ignore[arg-type]
            assert request is not None
            worker.receive(request)
    assert taken == [f"r{number}" for number in range(NUM_OFFERS)]
    assert num_deferred > NUM_OFFERS / 2
    worker.settle()
