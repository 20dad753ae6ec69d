"""Clients that leave, and clients that read slowly."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.asgi_exchange import AsgiExchange
from tests.fakes.door import MODEL, Door, eventually, open_door, run_async
from tests.integration.door.sse import events


def exchange(door: Door, **fields: Any) -> AsgiExchange:
    body = {"model": MODEL, "prompt": "Once", "max_tokens": 50, "ignore_eos": True, **fields}
    return AsgiExchange(door.app, "/v1/completions", body)


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("num_steps", [0, 1, 5, 49])
@run_async
async def test_a_client_that_leaves_ends_its_requests_everywhere(
    tiny_folder: Path, is_stream: bool, num_steps: int
) -> None:
    async with open_door(tiny_folder, is_pumping=False) as door:
        leaving = exchange(door, stream=is_stream, n=3)
        leaving.start()
        await eventually(lambda: len(door.cluster.running) == 3)
        for _ in range(num_steps):
            door.cluster.step()
            await asyncio.sleep(0)
        leaving.leave()
        await leaving.finished()
        await eventually(lambda: not door.cluster.running)
        assert sorted(door.cluster.cancelled) == [f"cmpl-id2/{k}" for k in range(3)]
        assert door.frontend.num_open == 0
        timeline = door.frontend.timeline("cmpl-id2")
        assert timeline is not None
        assert timeline["state"] == "cancelled"


@pytest.mark.parametrize("is_stream", [False, True])
@run_async
async def test_a_client_that_leaves_while_its_request_is_submitted_leaves_nothing(
    tiny_folder: Path, is_stream: bool
) -> None:
    async with open_door(tiny_folder, is_pumping=False) as door:
        door.cluster.answers.clear()
        leaving = exchange(door, stream=is_stream)
        leaving.start()
        await eventually(lambda: door.frontend.num_open == 1)
        leaving.leave()
        await leaving.finished()
        # The submission arrives after all; the cancel that follows takes it back.
        door.cluster.answers.set()
        await eventually(lambda: len(door.cluster.submissions) == 1)
        await eventually(lambda: not door.cluster.running)


@run_async
async def test_other_streams_do_not_notice_a_client_that_leaves(tiny_folder: Path) -> None:
    async with open_door(tiny_folder, is_pumping=False) as door:
        alone = exchange(door, stream=True, seed=1)
        alone.start()
        await eventually(lambda: len(door.cluster.running) == 1)
        while door.cluster.running:
            door.cluster.step()
        await alone.finished()

        streams = [exchange(door, stream=True, seed=1) for _ in range(6)]
        for stream in streams:
            stream.start()
        await eventually(lambda: len(door.cluster.running) == 6)
        for step in range(50):
            door.cluster.step()
            await asyncio.sleep(0)
            if step == 10:
                for stream in streams[::2]:
                    stream.leave()
        for stream in streams:
            await stream.finished()
    texts = [_text(stream) for stream in streams[1::2]]
    assert texts == [_text(alone)] * 3


@run_async
async def test_a_slow_client_gets_fewer_and_larger_pieces_of_the_same_text(tiny_folder: Path) -> None:
    async with open_door(tiny_folder, is_pumping=False) as door:
        slow, quick = exchange(door, stream=True, seed=1), exchange(door, stream=True, seed=1)
        for stream in (slow, quick):
            stream.start()
        await eventually(lambda: len(door.cluster.running) == 2)
        slow.reads.clear()
        while door.cluster.running:
            door.cluster.step()
            for _ in range(5):
                await asyncio.sleep(0)
        await quick.finished()
        slow.reads.set()
        await slow.finished()
    assert _text(slow) == _text(quick)
    assert len(slow.messages) < len(quick.messages) / 3


@run_async
async def test_the_head_of_a_stream_waits_for_the_first_token(tiny_folder: Path) -> None:
    async with open_door(tiny_folder, is_pumping=False) as door:
        stream = exchange(door, stream=True)
        stream.start()
        await eventually(lambda: len(door.cluster.running) == 1)
        await asyncio.sleep(0.01)
        assert stream.messages == []
        door.cluster.step()
        await eventually(lambda: stream.status == 200)
        stream.leave()
        await stream.finished()


def _text(stream: AsgiExchange) -> str:
    return "".join(event["choices"][0]["text"] for event in events(stream.text))
