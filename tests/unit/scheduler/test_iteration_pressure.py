"""What happens when pages are short (S3, S5)."""

from collections.abc import Sequence

from configs import SchedulerConfig
from scheduler.messages import WorkerRole
from scheduler.request import Request
from scheduler.states import AttemptEvent, AttemptState
from tests.fakes.attempts import make_spec, state_of
from tests.fakes.iteration_worker import IterationWorker, drawn_token, make_worker


def names(requests: Sequence[Request]) -> list[str]:
    return [request.attempt_id for request in requests]


def test_the_newest_generation_is_the_victim_and_its_state_says_so() -> None:
    worker = make_worker(num_pages=5)
    old = worker.context(make_spec("old", 7, max_tokens=8))
    new = worker.context(make_spec("new", 7, max_tokens=8))
    worker.step()
    worker.step()
    output = worker.step()
    assert output.num_recomputed == 1
    assert output.generations == (old,)
    assert state_of(new) is AttemptState.CONTEXT_INIT
    assert [change.event for change in new.history[-2:]] == [AttemptEvent.SUSPENDED, AttemptEvent.RECOMPUTE]
    assert list(worker.scheduler.running) == [old]
    assert list(worker.scheduler.waiting) == [new]


def test_a_lower_priority_is_the_victim_of_a_newer_request() -> None:
    worker = make_worker(num_pages=5)
    low = worker.context(make_spec("low", 7, max_tokens=8, priority=-1))
    high = worker.context(make_spec("high", 7, max_tokens=8))
    for _ in range(3):
        output = worker.step()
    assert output.generations == (high,)
    assert state_of(low) is AttemptState.CONTEXT_INIT


def test_a_recompute_paused_request_draws_the_same_tokens_as_one_never_paused() -> None:
    worker = make_worker(num_pages=5)
    for name in ("old", "new"):
        worker.context(make_spec(name, 7, max_tokens=8))
    worker.run_until_idle()
    assert sum(output.num_recomputed for output in worker.outputs) > 0
    for name in ("old", "new"):
        assert worker.tokens[name] == [drawn_token(name, position) for position in range(8)]


def test_a_paused_request_computes_every_known_token_again_and_draws_only_after_the_last() -> None:
    worker = make_worker(num_pages=5, config=SchedulerConfig(max_num_tokens=16, max_batch_size=2, chunk_unit_tokens=2))
    worker.context(make_spec("old", 7, max_tokens=8))
    new = worker.context(make_spec("new", 7, max_tokens=8))
    worker.step()
    while state_of(new) is AttemptState.GENERATION_IN_PROGRESS:
        worker.step()
    known, drawn = len(new.token_ids), len(worker.tokens["new"])
    restarted: list[tuple[int, int, bool]] = []
    while state_of(new) is AttemptState.CONTEXT_INIT:
        output = worker.step()
        restarted += [(c.start, c.num_tokens, c.is_last) for c in output.contexts if c.request is new]
    assert restarted[-1][0] + restarted[-1][1] == known
    assert [is_last for _, _, is_last in restarted] == [False] * (len(restarted) - 1) + [True]
    assert len(worker.tokens["new"]) == drawn + 1


def test_a_started_context_gives_way_to_a_decode_even_when_it_is_older() -> None:
    config = SchedulerConfig(max_num_tokens=9, max_batch_size=4, chunk_unit_tokens=4)
    worker = make_worker(WorkerRole.GENERATION, num_pages=5, config=config)
    context = worker.context(make_spec("context", 19, max_tokens=1))
    worker.step()
    decode = worker.admit_generation(make_spec("decode", 7, max_tokens=9))
    while worker.manager.has_cache(context.request_id):
        assert worker.step().generations == (decode,)
    assert worker.outputs[-1].num_recomputed == 1
    assert state_of(context) is AttemptState.CONTEXT_INIT
    assert worker.scheduler.waiting == [context]
    worker.run_until_idle()
    assert [request.attempt_id for request in worker.finished] == ["decode", "context"]


def test_nobody_new_starts_while_a_paused_request_waits_for_pages() -> None:
    worker = make_worker(num_pages=5)
    worker.context(make_spec("old", 7, max_tokens=12))
    paused = worker.context(make_spec("paused", 7, max_tokens=8))
    worker.step()
    while state_of(paused) is AttemptState.GENERATION_IN_PROGRESS:
        worker.step()
    worker.context(make_spec("small", 2, max_tokens=2))
    while state_of(paused) is AttemptState.CONTEXT_INIT and paused in worker.scheduler.waiting:
        assert "small" not in worker.tokens
        worker.step()
    worker.run_until_idle()
    assert len(worker.tokens["small"]) == 2


def test_a_request_that_fills_the_pool_alone_runs_to_its_end() -> None:
    worker = make_worker(num_pages=4)
    worker.context(make_spec("whole", 8, max_tokens=8))
    worker.run_until_idle()
    assert len(worker.tokens["whole"]) == 8


def test_a_stream_of_pool_filling_requests_is_served_one_after_the_other() -> None:
    worker = make_worker(num_pages=4, max_sequences=1)
    for name in "abcd":
        worker.context(make_spec(name, 8, max_tokens=8))
    worker.run_until_idle()
    assert [request.attempt_id for request in worker.finished] == list("abcd")
    assert worker.manager.availability().pages == worker.scheduler._shape.total_pages


def long_decode_loses_its_pages(role: WorkerRole, min_tokens: int) -> IterationWorker:
    config = SchedulerConfig(
        max_num_tokens=32, max_batch_size=2, chunk_unit_tokens=4, recompute_remote_min_tokens=min_tokens
    )
    worker = make_worker(role, num_pages=5, config=config)
    for name in ("old", "new"):
        worker.context(make_spec(name, 7, max_tokens=8))
    for _ in range(3):
        worker.step()
    return worker


def test_a_long_request_that_loses_its_pages_leaves_a_generation_worker_and_holds_nothing() -> None:
    worker = long_decode_loses_its_pages(WorkerRole.GENERATION, min_tokens=9)
    output = worker.outputs[-1]
    assert names(output.sent_away) == ["new"]
    assert state_of(output.sent_away[0]) is AttemptState.FAILED
    assert (output.num_suspended, output.num_recomputed) == (0, 0)
    assert names(worker.scheduler.running) == ["old"]
    assert not worker.scheduler.waiting
    assert worker.scheduler.counters()["sent_away"] == 1


def test_a_short_request_and_one_on_a_mixed_worker_stay_where_they_are() -> None:
    for role, min_tokens in ((WorkerRole.GENERATION, 10), (WorkerRole.GENERATION, 0), (WorkerRole.MIXED, 9)):
        worker = long_decode_loses_its_pages(role, min_tokens)
        assert not worker.outputs[-1].sent_away
        assert names(worker.scheduler.waiting) == ["new"]


def test_a_prompt_that_needs_the_whole_pool_is_admitted_though_a_cached_block_begins_like_its_second() -> None:
    worker = make_worker(num_pages=6, max_sequences=4)
    worker.context(make_spec("a", (1, 1, 1, 1, 1, 5, 6, 7, 8), max_tokens=3))
    worker.run_until_idle()
    request = worker.context(make_spec("b", (1, 1, 1, 1, 1, 9, *range(30, 47)), max_tokens=1))
    output = worker.step()
    assert output.deadlock is None
    assert [chunk.request for chunk in output.contexts] == [request]
