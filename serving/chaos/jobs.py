"""The requests of a chaos run, and the streams in which they come back, seen from a client over HTTP."""

import json
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

_VOCABULARY = range(3, 250)  # plain tokens of every model, the smallest ones included


@dataclass(frozen=True, slots=True)
class Job:
    """One request; the same job always gives the same tokens."""

    prompt: tuple[int, ...]
    max_tokens: int
    temperature: float
    seed: int

    def body(self, model: str) -> dict[str, object]:
        """Of POST /v1/completions."""
        return {
            "model": model,
            "prompt": list(self.prompt),
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "seed": self.seed,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }


def make_jobs(seed: int, count: int, output_tokens: int) -> list[Job]:
    """Prompts of 8 to 160 tokens, half of them greedy, some with a beginning in common."""
    draw = random.Random(f"jobs {seed}")
    shared = [draw.choice(_VOCABULARY) for _ in range(64)]
    jobs = []
    for index in range(count):
        own = [draw.choice(_VOCABULARY) for _ in range(draw.randint(8, 96))]
        prompt = shared[: draw.randint(17, 64)] + own if index % 3 == 0 else own
        num_tokens = draw.randint(output_tokens // 2, output_tokens)
        jobs.append(Job(tuple(prompt), num_tokens, 0.9 if index % 2 else 0.0, draw.randrange(1 << 31)))
    return jobs


@dataclass(slots=True)
class Stream:
    """What one request gave.

    Attributes:
        arrivals_s: of each chunk, on the client's monotonic clock.
        num_tokens: as the server counted them.
        error: in-band or by status; empty when it went well.
        is_aborted: the client left.
        is_role_dead: it failed while every worker of a role had been dead for longer than requests wait for one.
        timeline: of GET /requests/{id}, of the only choice.
    """

    job: Job
    text: str = ""
    arrivals_s: list[float] = field(default_factory=list)
    num_tokens: int = 0
    error: str = ""
    is_aborted: bool = False
    is_role_dead: bool = False
    timeline: Mapping[str, Any] = field(default_factory=dict)

    @property
    def num_resubmissions(self) -> int:
        """Attempts after the first."""
        return int(self.timeline.get("resubmissions", 0))

    @property
    def own_gaps_s(self) -> list[float]:
        """Of each interruption, what neither queue nor prefill nor transfer of the new attempt explains."""
        recoveries = self.timeline.get("recoveries", ())
        return [float(recovery["own_s"]) for recovery in recoveries if recovery["own_s"] is not None]


async def run_job(client: httpx.AsyncClient, model: str, job: Job, abort_after: int | None = None) -> Stream:
    """Send a job and read its stream to the end, or leave after `abort_after` chunks. Never raises for a fault."""
    stream = Stream(job)
    request_id = ""
    try:
        async with client.stream("POST", "/v1/completions", json=job.body(model)) as response:
            if response.status_code != httpx.codes.OK:
                stream.error = f"status {response.status_code}: {(await response.aread()).decode()[:300]}"
                return stream
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line.removeprefix("data: "))
                request_id = event.get("id", request_id)
                if not _take(stream, event):
                    return stream
                if abort_after is not None and len(stream.arrivals_s) >= abort_after:
                    stream.is_aborted = True
                    return stream
        answer = await client.get(f"/requests/{request_id}")
        if answer.status_code == httpx.codes.OK:
            (stream.timeline,) = answer.json()["choices"]
    except httpx.HTTPError as error:
        stream.error = f"{type(error).__name__}: {error}"
    return stream


def _take(stream: Stream, event: Mapping[str, Any]) -> bool:
    """Whether the stream goes on."""
    if "error" in event:
        stream.error = str(event["error"]["message"])
        return False
    if event.get("usage"):
        stream.num_tokens = int(event["usage"]["completion_tokens"])
    for choice in event["choices"]:
        stream.text += choice["text"]
        stream.arrivals_s.append(time.monotonic())
    return True


def percentile(values: Sequence[float], share: float) -> float:
    """Of unsorted values; 0 for none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0
