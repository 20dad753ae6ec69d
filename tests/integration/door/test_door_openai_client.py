"""OpenAI's own client against a real socket: what it sends is understood, what it gets it understands."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import openai
import pytest

from scheduler.messages import ErrorKind
from tests.fakes.door import MODEL, Door, eventually, open_door, run_async
from tests.fakes.listening import listening


@asynccontextmanager
async def client_of(folder: Path) -> AsyncIterator[tuple[openai.AsyncOpenAI, Door]]:
    """A server on a free port, inside this loop, as a door actor runs it."""
    async with open_door(folder, context_length=4096, max_request_tokens=4096) as door, listening(door.app) as url:
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        try:
            yield client, door
        finally:
            await client.close()


@run_async
async def test_completions_and_chats_parse_whole_and_streamed(tiny_folder: Path) -> None:
    async with client_of(tiny_folder) as (client, _):
        whole = await client.completions.create(model=MODEL, prompt="Once 中", max_tokens=30, seed=1, n=2)
        text = ["", ""]
        async for chunk in await client.completions.create(
            model=MODEL, prompt="Once 中", max_tokens=30, seed=1, n=2, stream=True
        ):
            text[chunk.choices[0].index] += chunk.choices[0].text
        assert text == [choice.text for choice in whole.choices]

        chat = await client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "Hi"}], seed=1, max_completion_tokens=20
        )
        said, usage = "", None
        async for part in await client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Hi"}],
            seed=1,
            max_completion_tokens=20,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"top_k": 0, "ignore_eos": False},
        ):
            usage = part.usage or usage
            said += "".join(choice.delta.content or "" for choice in part.choices)
        assert said == chat.choices[0].message.content
        assert usage == chat.usage
        assert [model.id async for model in client.models.list()] == [MODEL]


@run_async
async def test_errors_become_the_clients_own_exceptions(tiny_folder: Path) -> None:
    async with client_of(tiny_folder) as (client, door):
        with pytest.raises(openai.BadRequestError) as bad:
            await client.completions.create(model=MODEL, prompt="a", max_tokens=10_000)
        assert bad.value.code == "context_length_exceeded"
        with pytest.raises(openai.NotFoundError):
            await client.completions.create(model="gpt", prompt="a")
        with pytest.raises(openai.BadRequestError) as large:
            await client.completions.create(model=MODEL, prompt="", extra_body={"prompt": ""})
        assert large.value.param == "prompt"
        with pytest.raises(openai.APIStatusError) as too_large:
            await client.completions.create(model=MODEL, prompt="a" * 3_000_000)
        assert too_large.value.status_code == 413
        door.cluster.refusals = [ErrorKind.QUEUE_FULL]
        with pytest.raises(openai.RateLimitError):
            await client.completions.create(model=MODEL, prompt="a")
        door.cluster.refusals = [ErrorKind.NO_WORKER]
        with pytest.raises(openai.InternalServerError):
            await client.completions.create(model=MODEL, prompt="a", stream=True)


@run_async
async def test_a_fault_within_a_stream_raises_in_the_client(tiny_folder: Path) -> None:
    async with client_of(tiny_folder) as (client, door):
        await door.cluster.stop()
        pending = asyncio.create_task(
            client.completions.create(model=MODEL, prompt="a", max_tokens=50, stream=True, seed=1)
        )
        await eventually(lambda: len(door.cluster.running) == 1)
        door.cluster.step()
        stream = await pending
        door.cluster.lose_attempts(ErrorKind.ENGINE, retriable=False)
        with pytest.raises(openai.APIError, match="worker generation-0 was lost"):
            async for _ in stream:
                pass


@run_async
async def test_closing_a_stream_over_a_socket_cancels_its_request(tiny_folder: Path) -> None:
    async with client_of(tiny_folder) as (client, door):
        await door.cluster.stop()
        door.cluster.start(pause_s=0.005)
        stream = await client.completions.create(
            model=MODEL, prompt="a", max_tokens=3000, stream=True, n=4, extra_body={"ignore_eos": True}
        )
        async for _ in stream:
            break
        assert len(door.cluster.running) == 4
        await stream.close()
        await eventually(lambda: not door.cluster.running)
        assert len(door.cluster.cancelled) == 4


@run_async
async def test_a_cancelled_call_over_a_socket_cancels_its_request(tiny_folder: Path) -> None:
    async with client_of(tiny_folder) as (client, door):
        await door.cluster.stop()
        call = asyncio.create_task(client.completions.create(model=MODEL, prompt="a", max_tokens=3000))
        await eventually(lambda: len(door.cluster.running) == 1)
        call.cancel()
        await eventually(lambda: not door.cluster.running)
