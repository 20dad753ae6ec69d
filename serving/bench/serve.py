"""`pdserve bench serve`: latency and throughput of a running server, seen from a client over HTTP.

Either so many clients that each send the next request when the last is done, or arrivals of their own: Poisson
at a rate, or as a trace has them. Time to first token, inter-token latency and end to end are measured at the
client; the share of queue, prefill and transfer comes from the server's own timeline of each request.
"""

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from typing import Any

import httpx

from serving.bench.load import (
    Job,
    OneServer,
    RefusedError,
    closed_jobs,
    drive,
    poisson_jobs,
    summarize,
    trace_jobs,
)

_PERCENTILES = (50, 90, 99)


def run(arguments: argparse.Namespace) -> int:
    """Measure and print; exit code 1 when the server cannot be reached or a request failed."""
    try:
        report = asyncio.run(measure(arguments))
    except (httpx.HTTPError, RefusedError, OSError) as error:
        print(f"pdserve: bench serve: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    print(json.dumps(report) if arguments.json else _table(report))
    return 0


async def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Send the load; returns the report as a JSON-ready object."""
    jobs, clients = _jobs(arguments)
    target = OneServer(arguments.url, await _model_name(arguments.url))
    try:
        await drive(target, closed_jobs(1, arguments.prompt_tokens, arguments.output_tokens, -1), clients=1)  # warm-up
        samples, elapsed_s = await drive(target, jobs, clients=clients)
    finally:
        await target.close()
    return summarize(samples, elapsed_s) | {"concurrency": clients, "load": _load_name(arguments)}


def _jobs(arguments: argparse.Namespace) -> tuple[Sequence[Job], int | None]:
    """What to send, and the number of clients of a closed loop."""
    if arguments.trace is not None:
        return trace_jobs(arguments.trace, arguments.requests, arguments.scale, arguments.speed), None
    lengths = arguments.prompt_tokens, arguments.output_tokens
    if arguments.rate is not None:
        return poisson_jobs(arguments.requests, arguments.rate, *lengths, arguments.seed), None
    return closed_jobs(arguments.requests, *lengths, arguments.seed), arguments.concurrency


def _load_name(arguments: argparse.Namespace) -> str:
    if arguments.trace is not None:
        return f"{arguments.trace.name}, lengths / {arguments.scale}, {arguments.speed:g} times as fast"
    arrivals = f"{arguments.concurrency} at a time" if arguments.rate is None else f"{arguments.rate:g} a second"
    return f"{arrivals}, {arguments.prompt_tokens} prompt and {arguments.output_tokens} output tokens each"


async def _model_name(url: str) -> str:
    async with httpx.AsyncClient(base_url=url, timeout=30.0) as client:
        models = (await client.get("/v1/models")).raise_for_status().json()
    name: str = models["data"][0]["id"]
    return name


def _table(report: dict[str, Any]) -> str:
    lines = [f"{report['requests']} requests, {report['load']}", f"{'':24}{'p50':>10}{'p90':>10}{'p99':>10}"]
    for key, title in (("ttft_s", "time to first token"), ("itl_s", "inter-token latency"), ("e2e_s", "end to end")):
        values = "".join(f"{report[key].get(f'p{q}', float('nan')) * 1000:>10.1f}" for q in _PERCENTILES)
        lines.append(f"{title + ', ms':24}{values}")
    lines.append(f"output {report['output_tok_s']:.1f} tokens/s, with prompts {report['total_tok_s']:.1f} tokens/s")
    if report["ttft_share"]:
        shares = ", ".join(f"{title} {share:.0%}" for title, share in report["ttft_share"].items())
        lines.append(f"of the time to first token: {shares} (the transfer follows the first token, beside it)")
    return "\n".join(lines)
