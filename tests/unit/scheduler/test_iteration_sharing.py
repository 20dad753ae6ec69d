"""Sharing of rows and of prefixes among contexts (S7)."""

from configs import SchedulerConfig
from configs.scheduling import ChunkingPolicy
from scheduler.output import SchedulerOutput
from scheduler.states import AttemptState
from tests.fakes.attempts import make_spec, state_of
from tests.fakes.iteration_worker import IterationWorker, make_worker


def chunks(output: SchedulerOutput) -> list[tuple[str, int, int]]:
    return [(chunk.request.attempt_id, chunk.start, chunk.num_tokens) for chunk in output.contexts]


def equal_worker(rows: int, *, num_pages: int = 64, batch: int = 4) -> IterationWorker:
    config = SchedulerConfig(
        max_num_tokens=rows,
        max_batch_size=batch,
        chunk_unit_tokens=4,
        chunking=ChunkingPolicy.EQUAL_PROGRESS,
    )
    return make_worker(num_pages=num_pages, config=config)


def test_equal_progress_advances_every_context_by_the_same_units() -> None:
    worker = equal_worker(rows=16)
    for name in "abc":
        worker.context(make_spec(name, 20))
    assert chunks(worker.step()) == [("a", 0, 8), ("b", 0, 4), ("c", 0, 4)]
    assert chunks(worker.step()) == [("a", 8, 8), ("b", 4, 4), ("c", 4, 4)]


def test_equal_progress_lets_short_contexts_end_beside_a_long_one() -> None:
    worker = equal_worker(rows=16)
    worker.context(make_spec("long", 40))
    worker.context(make_spec("short", 6, max_tokens=1))
    assert chunks(worker.step()) == [("long", 0, 8), ("short", 0, 6)]
    assert [request.attempt_id for request in worker.finished] == ["short"]


def test_rows_that_short_contexts_leave_over_go_to_further_newcomers() -> None:
    worker = equal_worker(rows=8)
    for name in "abcd":
        worker.context(make_spec(name, 2))
    assert [name for name, _, _ in chunks(worker.step())] == ["a", "b", "c", "d"]


def test_equal_progress_starts_nobody_new_while_pages_are_short() -> None:
    worker = equal_worker(rows=16, num_pages=4)
    worker.context(make_spec("first", 12, max_tokens=4))
    second = worker.context(make_spec("second", 12, max_tokens=4))
    assert chunks(worker.step()) == [("first", 0, 8), ("second", 0, 8)]
    worker.context(make_spec("third", 2, max_tokens=2))
    worker.step()
    assert worker.outputs[-1].num_recomputed == 1
    assert state_of(second) is AttemptState.CONTEXT_INIT
    assert "third" not in worker.tokens
    worker.run_until_idle()
    assert [request.attempt_id for request in worker.finished] == ["first", "second", "third"]


def test_a_duplicate_waits_one_pass_and_then_finds_the_blocks() -> None:
    worker = make_worker()
    worker.context(make_spec("original", (*range(12), 50), max_tokens=1))
    duplicate = worker.context(make_spec("duplicate", (*range(12), 60), max_tokens=1))
    worker.context(make_spec("other", 6, max_tokens=1))
    assert chunks(worker.step()) == [("original", 0, 13), ("other", 0, 6)]
    assert chunks(worker.step()) == [("duplicate", 12, 1)]
    assert duplicate.num_reused_tokens == 12
    assert worker.scheduler.counters()["duplicate_deferrals"] == 1


def test_a_context_that_shares_less_than_a_block_does_not_wait() -> None:
    worker = make_worker()
    worker.context(make_spec("original", (1, 2, 3, 50, 51), max_tokens=1))
    worker.context(make_spec("near", (1, 2, 3, 60, 61), max_tokens=1))
    assert len(worker.step().contexts) == 2


def test_a_duplicate_of_one_block_does_not_wait_since_its_last_token_is_always_computed() -> None:
    worker = make_worker()
    worker.context(make_spec("original", (1, 2, 3, 4), max_tokens=1))
    worker.context(make_spec("same", (1, 2, 3, 4), max_tokens=1))
    assert len(worker.step().contexts) == 2


def test_waiting_for_blocks_can_be_turned_off() -> None:
    config = SchedulerConfig(max_num_tokens=32, max_batch_size=4, chunk_unit_tokens=4, defer_duplicate_prefixes=False)
    worker = make_worker(config=config)
    for name in ("original", "duplicate"):
        worker.context(make_spec(name, tuple(range(12)), max_tokens=1))
    assert len(worker.step().contexts) == 2


def test_a_duplicate_whose_original_is_cancelled_runs_in_the_next_pass() -> None:
    worker = make_worker()
    original = worker.context(make_spec("original", tuple(range(12))))
    worker.context(make_spec("duplicate", tuple(range(12))))
    worker.step()
    worker.scheduler.cancel(original.attempt_id, 0.0)
    assert [name for name, _, _ in chunks(worker.step())] == ["duplicate"]


def test_a_fresh_generation_takes_the_first_seat_once_when_asked_to() -> None:
    config = SchedulerConfig(max_num_tokens=1, max_batch_size=4, chunk_unit_tokens=1, fresh_generation_first=True)
    worker = make_worker(config=config)
    worker.context(make_spec("old", 1, max_tokens=8))
    worker.step()
    fresh = worker.offer(make_spec("fresh", 4, max_tokens=8))
    worker.step()
    worker.receive(fresh)
    seats = [worker.step().generations[0].attempt_id for _ in range(3)]
    assert seats == ["fresh", "old", "old"]
