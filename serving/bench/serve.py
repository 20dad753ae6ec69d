"""`pdserve bench serve`: latency and throughput of a running server, seen from a client over HTTP.

A closed loop of `concurrency` clients; every request has a prompt of its own (random token ids, so that
no prefix is cached). Time to first token, inter-token latency and end to end are measured at the client;
the share of queue, prefill and transfer comes from the server's own timeline of each request. Imports
nothing of the server, so that it can be pointed at any OpenAI-compatible one (without the shares then).
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
from tqdm import tqdm

_TIMEOUT_S = 600.0
_PERCENTILES = (50, 90, 99)
_VOCABULARY = range(300, 40_000)  # ordinary words of any vocabulary of this size: no special tokens


@dataclass(slots=True)
class Sample:
    """One finished request, in seconds since it was sent."""

    first_token_s: float
    end_s: float
    arrivals_s: list[float]
    num_tokens: int
    phases_s: dict[str, float] = field(default_factory=dict)

    @property
    def gaps_s(self) -> list[float]:
        """Times between tokens."""
        return [later - earlier for earlier, later in zip(self.arrivals_s, self.arrivals_s[1:], strict=False)]


@dataclass(frozen=True, slots=True)
class Load:
    """What to send."""

    url: str
    model: str
    requests: int
    concurrency: int
    prompt_tokens: int
    output_tokens: int
    seed: int


def run(arguments: argparse.Namespace) -> int:
    """Measure and print; exit code 1 when the server cannot be reached or a request failed."""
    try:
        report = asyncio.run(measure(arguments))
    except (httpx.HTTPError, RuntimeError) as error:
        print(f"pdserve: bench serve: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    print(json.dumps(report) if arguments.json else _table(report))
    return 0


async def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Send the load; returns the report as a JSON-ready object."""
    limits = httpx.Limits(max_connections=arguments.concurrency + 4)
    async with httpx.AsyncClient(base_url=arguments.url, timeout=_TIMEOUT_S, limits=limits) as client:
        models = (await client.get("/v1/models")).raise_for_status().json()
        load = Load(
            arguments.url,
            models["data"][0]["id"],
            arguments.requests,
            arguments.concurrency,
            arguments.prompt_tokens,
            arguments.output_tokens,
            arguments.seed,
        )
        await _send(client, load, load.requests)  # warm-up, not counted
        started_s = time.perf_counter()
        samples = await _send_all(client, load)
        elapsed_s = time.perf_counter() - started_s
    return _report(load, samples, elapsed_s)


async def _send_all(client: httpx.AsyncClient, load: Load) -> list[Sample]:
    todo = iter(range(load.requests))
    samples: list[Sample] = []
    with tqdm(total=load.requests, unit="request", file=sys.stderr) as progress:

        async def work() -> None:
            for index in todo:
                samples.append(await _send(client, load, index))
                progress.update()

        async with asyncio.TaskGroup() as group:
            for _ in range(load.concurrency):
                group.create_task(work())
    return samples


async def _send(client: httpx.AsyncClient, load: Load, index: int) -> Sample:
    draw = random.Random(load.seed * 1_000_003 + index)
    body = {
        "model": load.model,
        "prompt": [draw.choice(_VOCABULARY) for _ in range(load.prompt_tokens)],
        "max_tokens": load.output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    arrivals_s: list[float] = []
    request_id, num_tokens = "", 0
    sent_s = time.perf_counter()
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != httpx.codes.OK:
            message = f"status {response.status_code}: {(await response.aread()).decode()}"
            raise RuntimeError(message)
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise RuntimeError(event["error"]["message"])
            request_id = event["id"]
            if event.get("usage"):
                num_tokens = event["usage"]["completion_tokens"]
            if event["choices"]:
                arrivals_s.append(time.perf_counter() - sent_s)
    end_s = time.perf_counter() - sent_s
    sample = Sample(arrivals_s[0], end_s, arrivals_s, num_tokens or len(arrivals_s))
    sample.phases_s = await _phases(client, request_id)
    return sample


async def _phases(client: httpx.AsyncClient, request_id: str) -> dict[str, float]:
    answer = await client.get(f"/requests/{request_id}")
    if answer.status_code != httpx.codes.OK:
        return {}
    (choice,) = answer.json()["choices"]
    return dict(choice["phases"])


# -- report --------------------------------------------------------------------------------------------


def _percentiles(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    if not ordered:
        return {}
    return {f"p{q}": ordered[min(len(ordered) - 1, int(q / 100 * len(ordered)))] for q in _PERCENTILES}


def _report(load: Load, samples: Sequence[Sample], elapsed_s: float) -> dict[str, Any]:
    mean_first_s = statistics.fmean(sample.first_token_s for sample in samples)
    shares = {}
    for phase, title in (("queued_s", "queue"), ("context_s", "prefill"), ("transfer_s", "transfer")):
        spent_s = statistics.fmean(sample.phases_s.get(phase, 0.0) for sample in samples)
        shares[title] = spent_s / mean_first_s
    num_tokens = sum(sample.num_tokens for sample in samples)
    return {
        "requests": len(samples),
        "concurrency": load.concurrency,
        "prompt_tokens": load.prompt_tokens,
        "output_tokens": load.output_tokens,
        "ttft_s": _percentiles([sample.first_token_s for sample in samples]),
        "itl_s": _percentiles([gap for sample in samples for gap in sample.gaps_s]),
        "e2e_s": _percentiles([sample.end_s for sample in samples]),
        "output_tok_s": num_tokens / elapsed_s,
        "total_tok_s": (num_tokens + load.prompt_tokens * len(samples)) / elapsed_s,
        "ttft_share": shares,
    }


def _table(report: dict[str, Any]) -> str:
    lines = [f"{report['requests']} requests, {report['concurrency']} at a time, {report['prompt_tokens']} prompt and "]
    lines[0] += f"{report['output_tokens']} output tokens each"
    lines.append(f"{'':24}{'p50':>10}{'p90':>10}{'p99':>10}")
    for key, title in (("ttft_s", "time to first token"), ("itl_s", "inter-token latency"), ("e2e_s", "end to end")):
        values = "".join(f"{report[key].get(f'p{q}', float('nan')) * 1000:>10.1f}" for q in _PERCENTILES)
        lines.append(f"{title + ', ms':24}{values}")
    lines.append(f"output {report['output_tok_s']:.1f} tokens/s, with prompts {report['total_tok_s']:.1f} tokens/s")
    shares = ", ".join(f"{title} {share:.0%}" for title, share in report["ttft_share"].items())
    lines.append(f"of the time to first token: {shares} (the transfer follows the first token, beside it)")
    return "\n".join(lines)
