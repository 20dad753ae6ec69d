"""Who gets rows, seats and pages first (S1, S7)."""

from configs import SchedulerConfig
from scheduler.messages import WorkerRole
from scheduler.output import SchedulerOutput
from tests.fakes.attempts import make_spec
from tests.fakes.iteration_worker import make_worker


def chunks(output: SchedulerOutput) -> list[tuple[str, int, int]]:
    return [(chunk.request.attempt_id, chunk.start, chunk.num_tokens) for chunk in output.contexts]


def test_contexts_share_the_rows_first_come_first_served_in_whole_units() -> None:
    worker = make_worker(config=SchedulerConfig(max_num_tokens=22, max_batch_size=4, chunk_unit_tokens=4))
    worker.context(make_spec("a", 14))
    worker.context(make_spec("b", 18))
    worker.context(make_spec("c", 2))
    assert chunks(worker.step()) == [("a", 0, 14), ("b", 0, 8)]
    output = worker.step()
    assert [request.attempt_id for request in output.generations] == ["a"]
    assert chunks(output) == [("b", 8, 10), ("c", 0, 2)]


def test_decodes_take_their_rows_before_any_context() -> None:
    worker = make_worker(config=SchedulerConfig(max_num_tokens=5, max_batch_size=4, chunk_unit_tokens=4))
    worker.context(make_spec("a", 4))
    worker.context(make_spec("b", 4))
    worker.step()
    output = worker.step()
    assert [request.attempt_id for request in output.generations] == ["a"]
    assert chunks(output) == [("b", 0, 4)]
    assert not worker.step().contexts
    assert worker.outputs[-1].num_rows == 2


def test_beside_a_decode_contexts_take_no_more_than_their_bound_and_all_rows_without_one() -> None:
    config = SchedulerConfig(
        max_num_tokens=40, max_batch_size=8, chunk_unit_tokens=4, max_context_tokens_beside_decodes=8
    )
    worker = make_worker(config=config, role=WorkerRole.GENERATION)
    worker.context(make_spec("a", 30, max_tokens=4))
    assert chunks(worker.step()) == [("a", 0, 30)]
    worker.context(make_spec("b", 19))
    worker.context(make_spec("c", 4))
    assert [chunks(worker.step()) for _ in range(3)] == [[("b", 0, 8)], [("b", 8, 8)], [("b", 16, 3), ("c", 0, 4)]]


def test_the_token_of_a_chunk_that_is_not_the_last_is_not_drawn() -> None:
    worker = make_worker(config=SchedulerConfig(max_num_tokens=8, max_batch_size=4, chunk_unit_tokens=8))
    worker.context(make_spec("a", 20))
    lasts = [worker.step().contexts[0].is_last for _ in range(3)]
    assert lasts == [False, False, True]
    assert len(worker.tokens["a"]) == 1


def test_a_higher_priority_goes_first_among_waiting_contexts() -> None:
    worker = make_worker(config=SchedulerConfig(max_num_tokens=8, max_batch_size=4, chunk_unit_tokens=8))
    worker.context(make_spec("low", 8))
    worker.context(make_spec("high", 8, priority=1))
    assert chunks(worker.step()) == [("high", 0, 8)]


def test_a_started_context_goes_before_a_new_one_of_higher_priority() -> None:
    worker = make_worker(config=SchedulerConfig(max_num_tokens=8, max_batch_size=4, chunk_unit_tokens=8))
    worker.context(make_spec("started", 16))
    worker.step()
    worker.context(make_spec("new", 8, priority=1))
    assert chunks(worker.step()) == [("started", 8, 8)]


def test_no_more_requests_are_admitted_than_one_batch_can_seat() -> None:
    worker = make_worker(config=SchedulerConfig(max_num_tokens=32, max_batch_size=2, chunk_unit_tokens=4))
    for name in "abc":
        worker.context(make_spec(name, 4))
    assert [name for name, _, _ in chunks(worker.step())] == ["a", "b"]
    assert [request.attempt_id for request in worker.scheduler.waiting] == ["c"]
    assert not worker.step().contexts


def test_a_shared_prefix_is_found_and_counted_once() -> None:
    worker = make_worker()
    first = worker.context(make_spec("first", tuple(range(12)), max_tokens=1))
    worker.step()
    second = worker.context(make_spec("second", (*range(12), 99), max_tokens=1))
    assert chunks(worker.step()) == [("second", 12, 1)]
    assert (first.num_reused_tokens, second.num_reused_tokens) == (0, 12)


def test_offers_are_taken_before_contexts_of_the_same_pass() -> None:
    worker = make_worker(WorkerRole.GENERATION, num_pages=6)
    worker.context(make_spec("context", 12, max_tokens=2))
    offered = worker.offer(make_spec("offer", 12, max_tokens=4))
    output = worker.step()
    assert output.reserved == (offered,)
    assert not output.contexts
