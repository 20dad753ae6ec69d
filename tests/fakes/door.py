"""`Door`: the real frontend and HTTP app over a `FakeCluster`, for tests; and `run_async` for them."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import wraps
from itertools import count
from pathlib import Path
from typing import Any, ParamSpec

import httpx
from starlette.types import ASGIApp

from configs import ServerConfig
from scheduler.spec import DoorName
from serving.api.app import create_app
from serving.frontend import Frontend
from serving.generation_request import DoorSettings
from serving.tokenizer import Tokenizer
from tests.fakes.scheduler_endpoint import DrawToken, FakeCluster, hashed_tokens
from tests.fakes.tiny_tokenizer import EOS_TOKEN_ID

MODEL = "tiny"
VOCAB_SIZE = 400
CONTEXT_LENGTH = 128

_P = ParamSpec("_P")


def run_async(test: Callable[_P, Coroutine[Any, Any, None]]) -> Callable[_P, None]:
    """Run an async test on a loop of its own."""

    @wraps(test)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> None:
        asyncio.run(test(*args, **kwargs))

    return run


@dataclass
class Door:
    """All parts of one door."""

    tokenizer: Tokenizer
    cluster: FakeCluster
    frontend: Frontend
    app: ASGIApp
    client: httpx.AsyncClient

    async def complete(self, **fields: object) -> httpx.Response:
        """POST /v1/completions."""
        return await self.client.post("/v1/completions", json={"model": MODEL, "prompt": "Once", **fields})

    async def chat(self, text: str = "Hi", **fields: object) -> httpx.Response:
        """POST /v1/chat/completions."""
        messages = [{"role": "user", "content": text}]
        return await self.client.post("/v1/chat/completions", json={"model": MODEL, "messages": messages, **fields})


def settings(**changes: Any) -> DoorSettings:
    """Small limits."""
    values: dict[str, Any] = {
        "model_name": MODEL,
        "context_length": CONTEXT_LENGTH,
        "vocab_size": VOCAB_SIZE,
        "eos_token_ids": (EOS_TOKEN_ID,),
        "max_request_tokens": CONTEXT_LENGTH,
        "resubmit_delay_s": 0.001,
        "gap_deadline_s": 0.02,
        "submit_timeout_s": 1.0,
        "health_timeout_s": 0.05,
    }
    return DoorSettings(**{**values, **changes})


def make_frontend(
    tokenizer: Tokenizer, cluster: FakeCluster, clock: Callable[[], float], *, name: str = "door", **changes: Any
) -> Frontend:
    """A frontend over a fake cluster; seeds count up from 1000."""
    seeds = count(1000)
    frontend = Frontend(
        cluster,
        tokenizer,
        DoorName(name),
        settings(**changes),
        clock=clock,
        seed_source=lambda: next(seeds),
    )
    cluster.serve(frontend)
    return frontend


@asynccontextmanager
async def open_door(
    folder: Path,
    *,
    draw: DrawToken | None = None,
    config: ServerConfig | None = None,
    is_pumping: bool = True,
    name: str = "door",
    **changes: Any,
) -> AsyncIterator[Door]:
    """A door whose cluster works (unless `is_pumping` is False), and whose books are empty at the end."""
    tokenizer = Tokenizer.load(folder)
    cluster = FakeCluster(tokenizer, (EOS_TOKEN_ID,), draw or hashed_tokens(VOCAB_SIZE))
    frontend = make_frontend(tokenizer, cluster, asyncio.get_running_loop().time, name=name, **changes)
    ids = count(1)
    app = create_app(
        frontend,
        config or ServerConfig(max_body_bytes=100_000, max_choices=8, max_prompts=6),
        "1.2.3",
        wall_clock=lambda: 1_700_000_000.5,
        id_source=lambda: f"id{next(ids)}",
    )
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://door") as client:
        if is_pumping:
            cluster.start()
        try:
            yield Door(tokenizer, cluster, frontend, app, client)
        finally:
            await cluster.stop()
    await frontend.close()
    assert frontend.num_open == 0
    assert not cluster.running, "requests were left running"


async def eventually(condition: Callable[[], bool], timeout_s: float = 2.0) -> None:
    """Wait until `condition` holds. Raises TimeoutError."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 -- conditions have no events
            await asyncio.sleep(0.001)
