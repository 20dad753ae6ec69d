"""`ServedCluster`: the real door over a real cluster in this process: HTTP in, tokens of a small model out."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Protocol

import httpx
from starlette.types import ASGIApp

from configs import DeploymentConfig, ServerConfig, load_deployment
from scheduler.messages import DoorNotice, ErrorKind, SubmitReply
from scheduler.spec import DoorName, RequestSpec, RequestUid, Term
from serving.api.app import create_app
from serving.engine.model_folder import load_model_config
from serving.frontend import Frontend
from serving.generation_request import DoorSettings
from serving.tokenizer import Tokenizer
from tests.fakes.deployments import DOOR, Deployment

MODEL = "tiny"


def small_config(*, mixed: bool, max_sequences: int = 16, local_prefill: int = 0) -> DeploymentConfig:
    """A pair of workers, or one mixed one, in float32; prompts that lack more than `local_prefill` are handed over."""
    overrides: dict[str, dict[str, object]] = {
        "engine": {"dtype": "float32"},
        "cache": {"tiers": [{"tier": "device", "quota_bytes": 4 << 20}], "max_sequences": max_sequences},
        "scheduler": {"max_batch_size": max_sequences},
        "router": {"local_prefill_max_tokens": local_prefill},
    }
    return load_deployment("local-mixed" if mixed else "local-cpu", overrides)


class _Endpoint:
    """A door's calls, carried out at once."""

    def __init__(self, deployment: Deployment) -> None:
        self._cluster = deployment.cluster
        self.submissions: list[RequestSpec] = []

    async def submit(self, specs: Sequence[RequestSpec]) -> SubmitReply:
        self.submissions += specs
        return self._cluster.submit(DOOR, specs)

    async def cancel(self, uids: Sequence[RequestUid]) -> None:
        self._cluster.cancel(DOOR, uids)

    async def cluster_state(self) -> Mapping[str, object]:
        return {}

    async def health(self) -> tuple[bool, str]:
        return True, ""


@dataclass
class ServedCluster:
    """All parts of a served model.

    Attributes:
        lose_after: an attempt is lost once its request has this many tokens; each number counts once.
    """

    deployment: Deployment
    frontend: Frontend
    app: ASGIApp
    client: httpx.AsyncClient
    submissions: list[RequestSpec]
    lose_after: list[int]

    async def complete(self, prompt: object, **fields: object) -> dict[str, Any]:
        """POST /v1/completions; the answer, which must be a 200."""
        return await self._post("/v1/completions", {"prompt": prompt, **fields})

    async def chat(self, content: str, **fields: object) -> dict[str, Any]:
        """POST /v1/chat/completions with one user message; the answer, which must be a 200."""
        return await self._post("/v1/chat/completions", {"messages": [{"role": "user", "content": content}], **fields})

    async def events(self, path: str, **fields: object) -> list[dict[str, Any]]:
        """POST with `stream`; every event but the end mark."""
        answer = await self.client.post(path, json={"model": MODEL, "stream": True, **fields})
        assert answer.status_code == 200, answer.text
        lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
        assert lines.pop() == "[DONE]"
        return [json.loads(line) for line in lines]

    async def _post(self, path: str, fields: Mapping[str, object]) -> dict[str, Any]:
        answer = await self.client.post(path, json={"model": MODEL, **fields})
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found


class Serve(Protocol):
    """Starts a served model."""

    def __call__(self, *, mixed: bool = False) -> AbstractAsyncContextManager[ServedCluster]:
        """One mixed worker, or a pair."""
        ...


@asynccontextmanager
async def serve(
    config: DeploymentConfig, model_folder: Path, pool_folder: Path, server: ServerConfig | None = None
) -> AsyncIterator[ServedCluster]:
    """Serve a model folder; afterwards every pool is at its baseline."""
    deployment = Deployment(config, model_folder, pool_folder)
    endpoint = _Endpoint(deployment)
    frontend = _make_frontend(endpoint, model_folder)
    ids = count(1)
    app = create_app(
        frontend, server or ServerConfig(), "1", wall_clock=lambda: 1.0, id_source=lambda: f"id{next(ids)}"
    )
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://door", timeout=60) as client:
        served = ServedCluster(deployment, frontend, app, client, endpoint.submissions, [])
        pump, test = asyncio.create_task(_pump(served)), asyncio.current_task()
        assert test is not None
        # A cluster that broke answers nobody: its test must not wait for it.
        pump.add_done_callback(lambda done: done.cancelled() or test.cancel())
        try:
            yield served
        finally:
            pump.cancel()
            (fault,) = await asyncio.gather(pump, return_exceptions=True)
            if isinstance(fault, Exception):
                raise fault
            await frontend.close()
    deployment.settle_down()
    deployment.close()


def _make_frontend(endpoint: _Endpoint, model_folder: Path) -> Frontend:
    model = load_model_config(model_folder)
    settings = DoorSettings(
        context_length=model.max_position,
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_token_ids,
        max_request_tokens=model.max_position,
        resubmit_delay_s=0.001,
        model_name=MODEL,
    )
    seeds = count(1)
    clock: Callable[[], float] = asyncio.get_running_loop().time
    return Frontend(
        endpoint, Tokenizer.load(model_folder), DoorName(DOOR), settings, clock=clock, seed_source=lambda: next(seeds)
    )


async def _pump(served: ServedCluster) -> None:
    cluster = served.deployment.cluster
    while True:
        is_busy = cluster.pump()
        for batch in cluster.take_tokens():
            served.frontend.on_tokens(batch)
            longest = max((event.position + 1 for event in batch.events), default=0)
            if served.lose_after and longest >= served.lose_after[0]:
                served.lose_after.pop(0)
                _lose_everything(served)
        served.frontend.on_notices(cluster.take_notices())
        await asyncio.sleep(0 if is_busy else 0.001)


def _lose_everything(served: ServedCluster) -> None:
    """Every attempt ends as if its worker had died."""
    cluster = served.deployment.cluster
    uids = [spec.uid for spec in served.frontend.claim(Term(0))]
    cluster.cancel(DOOR, uids)
    while cluster.pump():
        served.frontend.on_notices(cluster.take_notices())
    cluster.take_tokens()
    served.frontend.on_notices(
        DoorNotice(uid, ErrorKind.WORKER_LOST, "its worker was lost", retriable=True) for uid in uids
    )
