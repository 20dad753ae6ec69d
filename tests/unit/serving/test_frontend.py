"""The frontend against a cluster that misbehaves: counts, cancels, and what it submits again."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from scheduler.messages import DoorNotice, ErrorKind, TokenEvent
from scheduler.spec import AttemptId, RequestUid, SamplingParams, StopParams, Term
from serving.frontend import Frontend
from serving.generation_request import GenerationRequest, PromptPart, RequestFailedError
from serving.open_request import OpenRequest
from serving.tokenizer import Tokenizer
from tests.fakes.door import VOCAB_SIZE, eventually, make_frontend, run_async
from tests.fakes.scheduler_endpoint import FakeCluster, hashed_tokens


@asynccontextmanager
async def opened(folder: Path, **changes: Any) -> AsyncIterator[tuple[Frontend, FakeCluster]]:
    tokenizer = Tokenizer.load(folder)
    cluster = FakeCluster(tokenizer, (2,), hashed_tokens(VOCAB_SIZE))
    frontend = make_frontend(tokenizer, cluster, asyncio.get_running_loop().time, **changes)
    yield frontend, cluster
    await frontend.close()
    assert not cluster.running


def make_request(api_id: str = "r", num_choices: int = 1, max_tokens: int = 6) -> GenerationRequest:
    return GenerationRequest(
        api_id,
        (PromptPart((5, 6, 7), max_tokens),),
        num_choices,
        SamplingParams(),
        seed=1,
        stop=StopParams(max_tokens=0, ignore_eos=True),
    )


async def finish(request: OpenRequest) -> list[int]:
    async for _ in request.deltas():
        pass
    return request.choices[0].stream.token_ids


def uid(name: str) -> RequestUid:
    return RequestUid(name)


@run_async
async def test_a_refused_request_leaves_nothing_open(tiny_folder: Path) -> None:
    async with opened(tiny_folder) as (frontend, cluster):
        cluster.refusals = [ErrorKind.QUEUE_FULL]
        with pytest.raises(RequestFailedError, match="queue_full") as refused:
            await frontend.submit(make_request(num_choices=3))
        assert refused.value.kind is ErrorKind.QUEUE_FULL
        assert frontend.num_open == 0
        # What was not refused with the others is taken back.
        await eventually(lambda: len(cluster.cancelled) == 3)


@run_async
async def test_an_unreachable_scheduler_fails_the_request_and_leaves_nothing_open(tiny_folder: Path) -> None:
    async with opened(tiny_folder) as (frontend, cluster):
        cluster.is_reachable = False
        with pytest.raises(RequestFailedError, match="no scheduler") as failed:
            await frontend.submit(make_request())
        assert failed.value.kind is ErrorKind.NO_WORKER
        assert frontend.num_open == 0


@run_async
async def test_events_and_notices_of_ended_or_unknown_requests_are_counted_and_ignored(tiny_folder: Path) -> None:
    async with opened(tiny_folder) as (frontend, cluster):
        request = await frontend.submit(make_request())
        while cluster.running:
            cluster.step()
        tokens = await finish(request)
        request.close()
        for name in ("r/0", "nobody/0"):
            cluster.deliver([TokenEvent(uid(name), AttemptId("1.1"), 0, 5)])
            frontend.on_notices([DoorNotice(uid(name), ErrorKind.WORKER_LOST, "lost", retriable=True)])
        assert request.choices[0].stream.token_ids == tokens
        assert frontend.counters() == {"requests": 1, "late_events": 2, "late_notices": 2}
        assert cluster.cancelled == []


@run_async
async def test_a_token_that_differs_from_the_accepted_one_is_counted_and_logged(
    tiny_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(tiny_folder) as (frontend, cluster):
        request = await frontend.submit(make_request())
        cluster.step()
        (first,) = request.choices[0].stream.token_ids
        cluster.deliver([TokenEvent(uid("r/0"), AttemptId("1.9"), 0, first + 1)])
        assert request.choices[0].stream.token_ids == [first]
        assert frontend.counters()["diverged_tokens"] == 1
        assert "attempt 1.9" in caplog.text
        request.close()


@run_async
async def test_closing_twice_cancels_once(tiny_folder: Path) -> None:
    async with opened(tiny_folder) as (frontend, cluster):
        request = await frontend.submit(make_request())
        request.close()
        request.close()
        await eventually(lambda: cluster.cancelled == ["r/0"])
        assert frontend.counters()["cancelled_requests"] == 1


@run_async
async def test_a_late_token_of_a_lost_attempt_is_used_and_the_new_attempt_is_told_of_the_end(
    tiny_folder: Path,
) -> None:
    async with opened(tiny_folder) as (frontend, cluster):
        request = await frontend.submit(make_request(max_tokens=3))
        cluster.step()
        lost = cluster.running[uid("r/0")]
        cluster.lose_attempts()
        await eventually(lambda: uid("r/0") in cluster.running)
        draw = cluster.draw
        cluster.deliver(
            [TokenEvent(uid("r/0"), lost.attempt_id, position, draw(lost.spec, position)) for position in (1, 2)]
        )
        assert len(await finish(request)) == 3
        await eventually(lambda: cluster.cancelled == ["r/0"])


@run_async
async def test_a_repeated_notice_resubmits_once(tiny_folder: Path) -> None:
    async with opened(tiny_folder) as (frontend, cluster):
        request = await frontend.submit(make_request())
        notice = DoorNotice(uid("r/0"), ErrorKind.WORKER_LOST, "lost", retriable=True)
        cluster.running.clear()
        frontend.on_notices([notice, notice, notice])
        await eventually(lambda: len(cluster.submissions) == 2)
        await asyncio.sleep(0.02)
        assert len(cluster.submissions) == 2
        request.close()


@run_async
async def test_a_resubmission_waits_while_no_worker_is_there_and_not_for_ever(tiny_folder: Path) -> None:
    async with opened(tiny_folder, resubmit_patience_s=0.05, max_resubmit_delay_s=0.005) as (frontend, cluster):
        request = await frontend.submit(make_request())
        cluster.refusals = [ErrorKind.NO_WORKER] * 4
        cluster.lose_attempts()
        await eventually(lambda: uid("r/0") in cluster.running)
        cluster.refusals = [ErrorKind.NO_WORKER] * 10_000
        cluster.lose_attempts()
        with pytest.raises(RequestFailedError) as failed:
            await finish(request)
        assert failed.value.kind is ErrorKind.NO_WORKER
        assert len(cluster.submissions) > 8


@run_async
async def test_a_scheduler_that_is_away_during_a_resubmission_is_waited_for(tiny_folder: Path) -> None:
    async with opened(tiny_folder) as (frontend, cluster):
        request = await frontend.submit(make_request())
        cluster.step()
        cluster.is_reachable = False
        cluster.lose_attempts()
        await asyncio.sleep(0.01)
        cluster.is_reachable = True
        await eventually(lambda: bool(cluster.running))
        while cluster.running:
            cluster.step()
        assert len(await finish(request)) == 6


@run_async
async def test_a_lost_last_token_is_fetched_again_after_a_silence(tiny_folder: Path) -> None:
    async with opened(tiny_folder, silence_s=0.05) as (frontend, cluster):
        request = await frontend.submit(make_request())
        deliver = cluster.delivers
        cluster.delivers = lambda event: () if event.finish_reason else (event,)
        while cluster.running:
            cluster.step()
        assert not request.is_finished
        cluster.delivers = deliver
        await eventually(lambda: bool(cluster.running))
        assert len(cluster.submissions[-1][0].accepted_token_ids) == 5
        cluster.step()
        assert len(await finish(request)) == 6
        assert frontend.counters()["refreshes"] == 1


@run_async
async def test_silence_of_a_queued_request_costs_a_submission_that_changes_nothing(tiny_folder: Path) -> None:
    async with opened(tiny_folder, silence_s=0.02) as (frontend, cluster):
        request = await frontend.submit(make_request())
        running = cluster.running[uid("r/0")]
        await eventually(lambda: len(cluster.submissions) >= 3)
        assert cluster.running[uid("r/0")] is running
        while cluster.running:
            cluster.step()
        assert len(await finish(request)) == 6
        assert "resubmissions" not in frontend.counters()
        request.close()
        # Nothing is left to be swept.
        num_submissions = len(cluster.submissions)
        await asyncio.sleep(0.05)
        assert len(cluster.submissions) == num_submissions


@run_async
async def test_silent_requests_are_not_submitted_at_every_look(tiny_folder: Path) -> None:
    async with opened(tiny_folder, silence_s=0.2) as (frontend, cluster):
        request = await frontend.submit(make_request())
        await asyncio.sleep(0.5)
        # Looks come four times as often.
        assert len(cluster.submissions) <= 3
        request.close()


@run_async
async def test_the_end_of_a_doubted_attempt_is_told_to_the_one_that_replaced_it(tiny_folder: Path) -> None:
    late: list[TokenEvent] = []

    def delay_the_end(event: TokenEvent) -> list[TokenEvent]:
        if event.finish_reason is None:
            return [event]
        late.append(event)
        return []

    async with opened(tiny_folder, silence_s=0.02) as (frontend, cluster):
        request = await frontend.submit(make_request())
        cluster.delivers = delay_the_end
        while cluster.running:
            cluster.step()
        await eventually(lambda: bool(cluster.running))
        cluster.deliver(late)
        assert len(await finish(request)) == 6
        await eventually(lambda: not cluster.running)


@run_async
async def test_a_token_lost_on_its_way_ends_the_attempt_that_sent_it_and_starts_another(tiny_folder: Path) -> None:
    async with opened(tiny_folder) as (frontend, cluster):
        request = await frontend.submit(make_request(max_tokens=100))
        cluster.step()
        first = cluster.running[uid("r/0")]
        cluster.delivers = lambda event: () if event.position == 1 else (event,)
        cluster.step()
        cluster.step()
        cluster.delivers = lambda event: (event,)
        await eventually(lambda: cluster.running.get(uid("r/0")) not in (None, first))
        assert cluster.submissions[-1][0].accepted_token_ids == tuple(request.choices[0].stream.token_ids)
        while cluster.running:
            cluster.step()
        assert len(await finish(request)) == 100
        assert frontend.counters()["resubmissions"] == 1


@run_async
async def test_a_request_closed_while_it_is_resubmitted_leaves_nothing(tiny_folder: Path) -> None:
    async with opened(tiny_folder, submit_timeout_s=0.05) as (frontend, cluster):
        request = await frontend.submit(make_request())
        cluster.answers.clear()
        cluster.lose_attempts()
        await asyncio.sleep(0.01)
        request.close()
        # The cancel is given up before the scheduler answers; the submission is carried out all the same.
        await asyncio.sleep(0.07)
        assert cluster.cancelled == []
        cluster.answers.set()
        await eventually(lambda: len(cluster.submissions) == 2)
        await eventually(lambda: not cluster.running)


@run_async
async def test_a_submission_that_timed_out_is_taken_back_when_it_arrives(tiny_folder: Path) -> None:
    async with opened(tiny_folder, submit_timeout_s=0.03) as (frontend, cluster):
        cluster.answers.clear()
        with pytest.raises(RequestFailedError, match=r"0\.03 s"):
            await frontend.submit(make_request())
        abandoned = asyncio.create_task(frontend.submit(make_request("s")))
        await asyncio.sleep(0.01)
        abandoned.cancel()
        await asyncio.sleep(0.1)
        assert cluster.cancelled == []
        cluster.answers.set()
        await eventually(lambda: len(cluster.submissions) == 2 and not cluster.running)
        await asyncio.gather(abandoned, return_exceptions=True)


@run_async
async def test_claimed_requests_continue_after_the_accepted_tokens_and_disturb_nothing(tiny_folder: Path) -> None:
    async with opened(tiny_folder) as (frontend, cluster):
        request = await frontend.submit(make_request(num_choices=2))
        cluster.step()
        specs = frontend.claim(Term(5))
        assert [spec.uid for spec in specs] == ["r/0", "r/1"]
        assert [list(spec.accepted_token_ids) for spec in specs] == [c.stream.token_ids for c in request.choices]
        while cluster.running:
            cluster.step()
        await finish(request)
        assert frontend.claim(Term(5)) == ()


@run_async
async def test_one_failed_choice_fails_the_request_and_cancels_the_others(tiny_folder: Path) -> None:
    async with opened(tiny_folder) as (frontend, cluster):
        request = await frontend.submit(make_request(num_choices=3))
        cluster.step()
        frontend.on_notices([DoorNotice(uid("r/1"), ErrorKind.ENGINE, "the step failed")])
        cluster.running.pop(uid("r/1"))
        with pytest.raises(RequestFailedError, match="the step failed"):
            await finish(request)
        await eventually(lambda: not cluster.running)
        timeline: Any = frontend.timeline("r")
        assert timeline["state"] == "failed"
        assert [choice["completion_tokens"] for choice in timeline["choices"]] == [1, 1, 1]


@run_async
async def test_closing_the_frontend_ends_open_requests_with_an_error_even_when_the_scheduler_hangs(
    tiny_folder: Path,
) -> None:
    async with opened(tiny_folder, submit_timeout_s=0.05) as (frontend, cluster):
        request = await frontend.submit(make_request())
        cluster.answers.clear()
        await frontend.close()
        with pytest.raises(RequestFailedError, match="shutting down"):
            await finish(request)
        cluster.running.clear()


@run_async
async def test_cached_tokens_of_a_prompt_are_counted_once_over_its_choices(tiny_folder: Path) -> None:
    async with opened(tiny_folder) as (frontend, cluster):
        request = await frontend.submit(make_request(num_choices=2))
        first, second = list(cluster.running)
        held = cluster.running.pop(second)
        cluster.step()
        # The second choice finds what the first one computed.
        cluster.cached_tokens = 3
        cluster.running[second] = held
        while cluster.running:
            cluster.step()
        await finish(request)
        assert first == "r/0"
        assert [choice.timeline.cached_tokens for choice in request.choices] == [0, 3]
        assert (request.usage().prompt_tokens, request.usage().cached_tokens) == (3, 0)


@run_async
async def test_notices_of_a_term_below_the_one_that_claimed_are_refused_and_counted(tiny_folder: Path) -> None:
    async with opened(tiny_folder) as (frontend, cluster):
        request = await frontend.submit(make_request(max_tokens=2))
        (spec,) = frontend.claim(Term(5))
        notice = DoorNotice(spec.uid, ErrorKind.INTERNAL, "of a dead term")
        frontend.on_notices([notice], Term(4))
        assert frontend.counters()["refused_terms"] == 1
        while not request.is_finished:
            cluster.step()
        assert len(await finish(request)) == 2
        request.close()


@run_async
async def test_a_new_request_waits_for_a_central_scheduler_that_is_being_restarted(tiny_folder: Path) -> None:
    async with opened(tiny_folder, restart_patience_s=5.0) as (frontend, cluster):
        cluster.is_reachable = False
        submitting = asyncio.create_task(frontend.submit(make_request(max_tokens=1)))
        await asyncio.sleep(0.25)
        assert not submitting.done()
        cluster.is_reachable = True
        request = await submitting
        cluster.step()
        assert len(await finish(request)) == 1
        request.close()


@run_async
async def test_patience_with_a_central_scheduler_that_stays_away_has_an_end(tiny_folder: Path) -> None:
    async with opened(tiny_folder, restart_patience_s=0.2) as (frontend, cluster):
        cluster.is_reachable = False
        with pytest.raises(RequestFailedError):
            await frontend.submit(make_request())
        assert frontend.num_open == 0
        cluster.is_reachable = True
