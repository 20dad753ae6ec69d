"""One streamed completion over HTTP, timed where the bytes arrive."""

import json
import time
from typing import Any, Protocol

import httpx

from serving.bench.load.sample import Sample
from serving.bench.load.workload import Job

_TIMEOUT_S = 900.0


class RefusedError(Exception):
    """The server did not complete a request: its status or its error."""


class Target(Protocol):
    """Something that completes a prompt."""

    async def complete(self, job: Job, due_s: float) -> Sample:
        """Send one job and read its stream to the end.

        Args:
            job: what to send.
            due_s: on `time.perf_counter`.

        Raises:
            RefusedError: any answer but a complete stream.
        """
        ...

    async def close(self) -> None:
        """Close the connections."""
        ...


class OneServer:
    """Any server with `/v1/completions`."""

    def __init__(self, url: str, model: str) -> None:
        """`model`: as `/v1/models` names it."""
        self._client = _connect(url)
        self._model = model

    async def complete(self, job: Job, due_s: float) -> Sample:
        """As `Target` says; reads the phases of `/requests/{id}` where the server has them."""
        sample, request_id = await _stream(self._client, self._model, job, due_s, {})
        sample.phases_s = await self._phases(request_id)
        return sample

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def _phases(self, request_id: str) -> dict[str, float]:
        answer = await self._client.get(f"/requests/{request_id}")
        if answer.status_code != httpx.codes.OK:
            return {}
        (choice,) = answer.json()["choices"]
        return dict(choice["phases"])


class PrefillDecodePair:
    """Two vLLM servers with a NIXL connector: the client does what their proxy does.

    One token from the prefill server, with a request to keep the blocks; then the same prompt to the decode
    server, with the parameters that the first returned. Without a proxy in between, so no slower than one.
    """

    def __init__(self, prefill_url: str, decode_url: str, model: str) -> None:
        """`model`: as both servers name it."""
        self._prefill, self._decode = _connect(prefill_url), _connect(decode_url)
        self._model = model

    async def complete(self, job: Job, due_s: float) -> Sample:
        """As `Target` says."""
        keep = {"do_remote_decode": True, "do_remote_prefill": False}
        fields = {"remote_engine_id": None, "remote_block_ids": None, "remote_host": None, "remote_port": None}
        body = _body(self._model, job) | {"max_tokens": 1, "kv_transfer_params": keep | fields}
        answer = await self._prefill.post("/v1/completions", json=body)
        if answer.status_code != httpx.codes.OK:
            raise RefusedError(_refusal(answer.status_code, answer.text))
        pull = {"kv_transfer_params": answer.json()["kv_transfer_params"]}
        sample, _ = await _stream(self._decode, self._model, job, due_s, pull)
        return sample

    async def close(self) -> None:
        """Close the connections."""
        await self._prefill.aclose()
        await self._decode.aclose()


def _connect(url: str) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
    return httpx.AsyncClient(base_url=url, timeout=_TIMEOUT_S, limits=limits)


def _body(model: str, job: Job) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": list(job.token_ids),
        "max_tokens": job.max_tokens,
        "temperature": 0,
        "ignore_eos": True,
    }


async def _stream(
    client: httpx.AsyncClient, model: str, job: Job, due_s: float, more: dict[str, Any]
) -> tuple[Sample, str]:
    body = _body(model, job) | more | {"stream": True, "stream_options": {"include_usage": True}}
    arrivals_s: list[float] = []
    request_id, num_tokens = "", 0
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != httpx.codes.OK:
            raise RefusedError(_refusal(response.status_code, (await response.aread()).decode()))
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise RefusedError(event["error"]["message"])
            request_id = event["id"]
            if event.get("usage"):
                num_tokens = event["usage"]["completion_tokens"]
            if event["choices"]:
                arrivals_s.append(time.perf_counter() - due_s)
    if not arrivals_s:
        msg = f"request {request_id!r}: the stream ended without a token"
        raise RefusedError(msg)
    end_s = time.perf_counter() - due_s
    sample = Sample(job.kind, len(job.token_ids), num_tokens or len(arrivals_s), arrivals_s, end_s)
    return sample, request_id


def _refusal(status: int, text: str) -> str:
    return f"status {status}: {text}"
