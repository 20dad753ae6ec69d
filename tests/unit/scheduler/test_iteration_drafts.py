"""Decodes with different draft lengths in one batch (V3, V18)."""

import pytest

from configs import SchedulerConfig
from scheduler.errors import CallOutOfTurn
from scheduler.messages import WorkerRole
from scheduler.output import DrawnToken
from scheduler.request import Request
from tests.fakes.attempts import make_spec
from tests.fakes.iteration_worker import IterationWorker, make_worker


def decoding(worker: IterationWorker, name: str, *, drafts: int, prompt: int = 4, max_tokens: int = 40) -> Request:
    request = worker.context(make_spec(name, prompt, max_tokens=max_tokens))
    worker.step()
    request.num_draft_tokens = drafts
    return request


def test_each_decode_gets_rows_and_places_for_its_own_draft_length() -> None:
    worker = make_worker(num_pages=32)
    for name, drafts in (("none", 0), ("two", 2), ("five", 5)):
        decoding(worker, name, drafts=drafts)
    output = worker.schedule()
    lengths = dict(zip([r.attempt_id for r in output.generations], output.draft_lengths, strict=True))
    assert lengths == {"none": 0, "two": 2, "five": 5}
    assert output.num_rows == 3 + 7
    for request, length in zip(output.generations, output.draft_lengths, strict=True):
        assert worker.manager.capacity(request.request_id) >= len(request.token_ids) + length


def test_accepted_drafts_are_tokens_like_any_other_and_rejected_ones_leave_nothing() -> None:
    worker = make_worker(num_pages=32)
    request = decoding(worker, "x", drafts=4)
    known = len(request.token_ids)
    output = worker.schedule()
    drawn = {request.request_id: DrawnToken(93, accepted_token_ids=(91, 92))}
    completed = worker.scheduler.complete(output, drawn, 0.0)
    assert [(position, token.token_id) for _, position, token in completed.tokens] == [(1, 91), (2, 92), (3, 93)]
    assert list(request.token_ids[known:]) == [91, 92, 93]
    assert worker.manager.history_length(request.request_id) == len(request.token_ids) - 1
    worker.manager.audit()


def test_drafts_never_take_a_row_that_another_decode_needs() -> None:
    config = SchedulerConfig(max_num_tokens=5, max_batch_size=4, chunk_unit_tokens=4)
    worker = make_worker(num_pages=32, config=config)
    for request in [decoding(worker, name, drafts=0, prompt=2) for name in "abc"]:
        request.num_draft_tokens = 4
    output = worker.schedule()
    assert [request.attempt_id for request in output.generations] == ["a", "b", "c"]
    assert output.draft_lengths == (2, 0, 0)


def test_nobody_is_pushed_out_for_the_sake_of_drafts() -> None:
    worker = make_worker(num_pages=5, max_sequences=2)
    older = decoding(worker, "older", drafts=0, prompt=7, max_tokens=5)
    newer = decoding(worker, "newer", drafts=0, prompt=5, max_tokens=3)
    older.num_draft_tokens = 8
    output = worker.schedule()
    assert output.generations == (older, newer)
    assert output.draft_lengths == (0, 0)
    assert output.num_recomputed == 0
    assert older.num_draft_tokens == 8


def test_an_offer_reserves_the_places_of_its_first_drafts() -> None:
    worker = make_worker(WorkerRole.GENERATION, num_pages=16)
    request = worker.offer(make_spec("x", 7, max_tokens=20))
    request.num_draft_tokens = 6
    worker.step()
    before = worker.manager.availability()
    worker.receive(request)
    assert worker.schedule().draft_lengths == (6,)
    assert worker.manager.availability() == before


def test_more_accepted_drafts_than_the_step_had_are_refused_with_nothing_changed() -> None:
    worker = make_worker(num_pages=32)
    request = decoding(worker, "x", drafts=1)
    output = worker.schedule()
    before, known = worker.manager.snapshot(), list(request.token_ids)
    drawn = {request.request_id: DrawnToken(93, accepted_token_ids=(91, 92))}
    with pytest.raises(CallOutOfTurn, match="2 drafts accepted, but the step had 1"):
        worker.scheduler.complete(output, drawn, 0.0)
    assert worker.manager.snapshot() == before
    assert list(request.token_ids) == known
