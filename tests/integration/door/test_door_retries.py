"""Attempts that are lost, tokens that come twice, late or never: the client sees none of it, or an honest error."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from scheduler.messages import ErrorKind, TokenEvent
from tests.fakes.asgi_exchange import AsgiExchange
from tests.fakes.door import MODEL, Door, eventually, open_door, run_async
from tests.integration.door.sse import events

FIELDS: dict[str, Any] = {"n": 2, "seed": 3, "max_tokens": 20, "ignore_eos": True}


async def start(door: Door, **fields: Any) -> AsgiExchange:
    body = {"model": MODEL, "prompt": "Once", **FIELDS, **fields}
    exchange = AsgiExchange(door.app, "/v1/completions", body)
    exchange.start()
    await eventually(lambda: len(door.cluster.running) == 2)
    return exchange


async def steps(door: Door, num_steps: int) -> None:
    for _ in range(num_steps):
        door.cluster.step()
        await asyncio.sleep(0)


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("losses", [[0], [1], [7], [19], [3, 3, 4], [5, 0, 0]])
@run_async
async def test_lost_attempts_change_neither_text_nor_usage(
    tiny_folder: Path, losses: list[int], is_stream: bool
) -> None:
    async with open_door(tiny_folder, is_pumping=False) as door:
        undisturbed = await start(door, stream_options={"include_usage": True}, stream=True)
        await steps(door, 20)
        await undisturbed.finished()
        door.cluster.cached_tokens = 3

        options = {"stream": True, "stream_options": {"include_usage": True}} if is_stream else {}
        disturbed = await start(door, **options)
        for num_steps in losses:
            await steps(door, num_steps)
            door.cluster.lose_attempts()
            # What a new attempt finds in its cache is no longer the prompt's reuse.
            if sum(losses[: losses.index(num_steps) + 1]):
                door.cluster.cached_tokens = 1
            await eventually(lambda: len(door.cluster.running) == 2)
        await steps(door, 20)
        await disturbed.finished()
        resubmitted = door.cluster.submissions[2:]
        timeline = door.frontend.timeline("cmpl-id4")
    assert [spec.uid for specs in resubmitted for spec in specs] == ["cmpl-id4/0", "cmpl-id4/1"] * len(losses)
    assert {spec.sampling.seed for specs in resubmitted for spec in specs} == {3}
    assert {spec.stop.max_tokens for specs in resubmitted for spec in specs} == {20}
    expected = events(undisturbed.text)
    if is_stream:
        assert _texts(events(disturbed.text)) == _texts(expected)
        usage = events(disturbed.text)[-1]["usage"]
    else:
        answer = answer_of(disturbed)
        assert [choice["text"] for choice in answer["choices"]] == _texts(expected)
        usage = answer["usage"]
    assert usage["completion_tokens"] == expected[-1]["usage"]["completion_tokens"] == 40
    assert usage["prompt_tokens"] == expected[-1]["usage"]["prompt_tokens"]
    assert timeline is not None
    choices: Any = timeline["choices"]
    assert [choice["resubmissions"] for choice in choices] == [len(losses)] * 2


@run_async
async def test_a_request_that_is_lost_too_often_fails_with_its_true_status(tiny_folder: Path) -> None:
    async with open_door(tiny_folder, is_pumping=False, max_resubmissions=2) as door:
        exchange = await start(door)
        for _ in range(2):
            door.cluster.lose_attempts()
            await eventually(lambda: len(door.cluster.running) == 2)
        door.cluster.lose_attempts()
        await exchange.finished()
    assert exchange.status == 503
    assert "worker generation-0 was lost" in answer_of(exchange)["error"]["message"]
    assert "2 resubmissions" in answer_of(exchange)["error"]["message"]


@pytest.mark.parametrize("kind", [ErrorKind.ENGINE, ErrorKind.DEADLINE])
@run_async
async def test_a_fault_after_the_head_is_an_event_and_then_the_end(tiny_folder: Path, kind: ErrorKind) -> None:
    async with open_door(tiny_folder, is_pumping=False) as door:
        exchange = await start(door, stream=True)
        await steps(door, 4)
        await eventually(lambda: exchange.status == 200)
        door.cluster.lose_attempts(kind, retriable=False)
        await exchange.finished()
    found = events(exchange.text)
    assert found[-1]["error"]["code"] == kind.value
    assert set(found[-1]["error"]) == {"message", "type", "param", "code"}
    # A fault is never called length or stop.
    assert all(choice["finish_reason"] is None for event in found[:-1] for choice in event["choices"])


@run_async
async def test_a_fault_before_the_head_has_a_status_and_cancels_the_other_choices(tiny_folder: Path) -> None:
    async with open_door(tiny_folder, is_pumping=False) as door:
        exchange = await start(door, stream=True)
        lost = next(iter(door.cluster.running))
        kept = door.cluster.running.pop(next(uid for uid in door.cluster.running if uid != lost))
        door.cluster.lose_attempts(ErrorKind.ENGINE, retriable=False)
        door.cluster.running[kept.spec.uid] = kept
        await exchange.finished()
        await eventually(lambda: not door.cluster.running)
    assert exchange.status == 500
    assert kept.spec.uid in door.cluster.cancelled


@run_async
async def test_repeated_late_and_overtaking_events_do_not_change_the_stream(tiny_folder: Path) -> None:
    held: list[TokenEvent] = []

    def shuffle(event: TokenEvent) -> list[TokenEvent]:
        # Every third event is overtaken by its successor; everything comes twice.
        if event.position % 3 == 1 and not held and event.finish_reason is None:
            held.append(event)
            return []
        late = [held.pop()] if held else []
        return [event, event, *late, *late]

    fields = {**FIELDS, "n": 1}
    async with open_door(tiny_folder) as door:
        expected = (await door.complete(**fields)).json()
        door.cluster.delivers = shuffle
        found = (await door.complete(**fields)).json()
        counters = door.frontend.counters()
    assert found["choices"] == expected["choices"]
    assert found["usage"] == expected["usage"]
    assert counters["repeated_tokens"] > 5
    assert counters["held_tokens"] > 5
    assert "resubmissions" not in counters


@run_async
async def test_a_token_that_never_comes_is_asked_for_again(tiny_folder: Path) -> None:
    is_lost = False

    def lose_one(event: TokenEvent) -> list[TokenEvent]:
        nonlocal is_lost
        if event.position == 6 and not is_lost:
            is_lost = True
            return []
        return [event]

    fields = {**FIELDS, "n": 1, "max_tokens": 12}
    async with open_door(tiny_folder) as door:
        expected = (await door.complete(**fields)).json()
        door.cluster.delivers = lose_one
        found = (await door.complete(**fields)).json()
        counters = door.frontend.counters()
    assert found["choices"] == expected["choices"]
    assert counters["lasting_gaps"] == 1
    assert counters["resubmissions"] == 1


@run_async
async def test_a_resubmission_that_is_refused_for_now_is_tried_again(tiny_folder: Path) -> None:
    async with open_door(tiny_folder, is_pumping=False) as door:
        exchange = await start(door)
        await steps(door, 3)
        door.cluster.refusals = [ErrorKind.NO_WORKER, ErrorKind.QUEUE_FULL]
        door.cluster.lose_attempts()
        await eventually(lambda: len(door.cluster.running) == 2)
        await steps(door, 20)
        await exchange.finished()
    assert exchange.status == 200


@run_async
async def test_a_resubmission_that_can_never_fit_fails(tiny_folder: Path) -> None:
    async with open_door(tiny_folder, is_pumping=False) as door:
        exchange = await start(door)
        door.cluster.refusals = [ErrorKind.NEVER_FITS]
        door.cluster.lose_attempts()
        await exchange.finished()
    assert exchange.status == 400


def answer_of(exchange: AsgiExchange) -> dict[str, Any]:
    parsed: dict[str, Any] = json.loads(exchange.text)
    return parsed


def _texts(found: list[dict[str, Any]]) -> list[str]:
    texts = ["", ""]
    for event in found:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
    return texts
