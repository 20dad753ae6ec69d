"""`pdserve bench compare`: the same client and the same requests against one deployment after another.

Two loads. `streams`: so many clients at a time, random prompts. `long-prompts`: streams that decode all the time
while a long prompt arrives every few seconds; there the first token is of the long prompts, the time between
tokens of the streams, which is what disaggregation is for. Each measurement is kept, so that a run that was
stopped goes on; a deployment is only started for what is missing.
"""

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import httpx

from serving.bench.load import (
    DeploymentChoice,
    DeploymentError,
    Lengths,
    RefusedError,
    ResultsFile,
    Sample,
    Target,
    closed_jobs,
    drive,
    long_prompt_jobs,
    make_deployment,
    percentile,
    running,
)
from serving.bench.report import write_report

Row = dict[str, Any]
_STREAM_PROMPT = Lengths(32, 32)
_STREAM_OUTPUT = Lengths(256, 256)


def run(arguments: argparse.Namespace) -> int:
    """Measure and print; exit code 1 when a deployment does not come up or fails a request."""
    try:
        rows = asyncio.run(measure(arguments))
    except (DeploymentError, RefusedError, httpx.HTTPError) as error:
        print(f"pdserve: bench compare: {error}", file=sys.stderr)
        return 1
    if arguments.report is not None:
        write_report(arguments.report, rows)
    print(json.dumps({"compare": rows}) if arguments.json else _table(rows))
    return 0


async def measure(arguments: argparse.Namespace) -> list[Row]:
    """One row per deployment, load and round."""
    results = ResultsFile(arguments.results)
    choice = DeploymentChoice.of(arguments)
    loads = _loads(arguments)
    rows = []
    for round_ in range(arguments.rounds):
        for name in arguments.deployments:
            keys = [
                load | {"server": name, "dtype": arguments.dtype, "seed": arguments.seed + round_} for load in loads
            ]
            if all(results.has(key) for key in keys):
                rows += [await results.get_or_measure(key, _nothing) for key in keys]
                continue
            async with running(make_deployment(name, choice), arguments.logs) as target:
                rows += [await results.get_or_measure(key, partial(_measure, target, key)) for key in keys]
    return rows


async def _nothing() -> Row:
    msg = "a row that was there is gone"
    raise LookupError(msg)


def _loads(arguments: argparse.Namespace) -> list[Row]:
    if arguments.load == "long-prompts":
        return [
            {
                "load": "long-prompts",
                "streams": arguments.streams[0],
                "prompt": arguments.long_prompt,
                "every_s": arguments.every,
                "seconds": arguments.seconds,
            }
        ]
    return [
        {
            "load": "streams",
            "streams": streams,
            "prompt": arguments.prompt_tokens,
            "output": arguments.output_tokens,
            "requests": max(arguments.requests, 2 * streams),
        }
        for streams in arguments.streams
    ]


async def _measure(target: Target, key: Row) -> Row:
    await drive(target, closed_jobs(1, _STREAM_PROMPT, Lengths(8, 8), -1), clients=1, title="warm-up")
    if key["load"] == "streams":
        lengths = Lengths(key["prompt"], key["prompt"]), Lengths(key["output"], key["output"])
        jobs = closed_jobs(key["requests"], *lengths, key["seed"])
        samples, elapsed_s = await drive(target, jobs, clients=key["streams"], title=_title(key))
        return key | _figures(samples, samples, elapsed_s)
    long_jobs = long_prompt_jobs(key["seconds"], key["every_s"], key["prompt"], 4, key["seed"])
    streams = closed_jobs(key["streams"], _STREAM_PROMPT, _STREAM_OUTPUT, key["seed"], "stream")
    samples, elapsed_s = await drive(target, long_jobs, background=streams, title=_title(key))
    by_kind = {kind: [sample for sample in samples if sample.kind == kind] for kind in ("long", "stream")}
    return key | _figures(by_kind["long"], by_kind["stream"], elapsed_s)


def _figures(first: Sequence[Sample], between: Sequence[Sample], elapsed_s: float) -> Row:
    """The time to first token of some samples, the time between tokens and the throughput of others."""
    ttft_s = [sample.first_token_s for sample in first]
    itl_s = [gap for sample in between for gap in sample.gaps_s]
    row: Row = {f"ttft_p{q}_s": percentile(ttft_s, q) for q in (50, 99)}
    row |= {f"itl_p{q}_s": percentile(itl_s, q) for q in (50, 99)}
    return row | {"tok_s": sum(sample.num_tokens for sample in between) / elapsed_s, "finished": len(first)}


def _title(key: Row) -> str:
    return f"{key['server']} {key['load']} {key['streams']}"


def _table(rows: Sequence[Row]) -> str:
    head = ("ttft p50", "ttft p99", "itl p50", "itl p99", "tok/s")
    lines = [
        f"{'server':20}{'load':>14}{'streams':>8}" + "".join(f"{title:>10}" for title in head) + "   (times in ms)"
    ]
    for row in rows:
        times = (row["ttft_p50_s"], row["ttft_p99_s"], row["itl_p50_s"], row["itl_p99_s"])
        figures = "".join(f"{value * 1000:>10.1f}" for value in times)
        lines.append(f"{row['server']:20}{row['load']:>14}{row['streams']:>8}{figures}{row['tok_s']:>10.1f}")
    return "\n".join(lines)
