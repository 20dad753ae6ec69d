"""`pdserve bench goodput`: the highest request rate that a deployment serves well.

Served well: at least so large a share of the requests had their first token and, on average, every further one
within the targets. The rate is found by bisection over Poisson arrivals of the same prompts, so that two
deployments see the same requests. Each probe is kept, so that a run that was stopped goes on.
"""

import argparse
import asyncio
import json
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from serving.bench.load import (
    Deployment,
    DeploymentChoice,
    DeploymentError,
    Lengths,
    RefusedError,
    ResultsFile,
    Sample,
    Target,
    closed_jobs,
    drive,
    make_deployment,
    poisson_jobs,
    running,
)

Probe = Callable[[float], Awaitable[bool]]


@dataclass(frozen=True, slots=True)
class Targets:
    """What counts as served well.

    Attributes:
        ttft_s: first token after at most so long.
        tpot_s: mean time per further token.
        share: of the requests that must meet both.
    """

    ttft_s: float
    tpot_s: float
    share: float

    def attainment(self, samples: Sequence[Sample]) -> float:
        """Share of requests that met both."""
        met = sum(sample.first_token_s <= self.ttft_s and sample.mean_gap_s <= self.tpot_s for sample in samples)
        return met / len(samples)


@dataclass(frozen=True, slots=True)
class Workload:
    """Lengths of prompts and outputs. Written `PROMPT/OUTPUT`, each as `Lengths` has it."""

    prompt: Lengths
    output: Lengths

    @classmethod
    def parse(cls, text: str) -> "Workload":
        """From the command line. Raises ValueError."""
        prompt, _, output = text.partition("/")
        return cls(Lengths.parse(prompt), Lengths.parse(output))

    def __str__(self) -> str:
        return f"{self.prompt}/{self.output}"


@dataclass(frozen=True, slots=True)
class Search:
    """How the rate is looked for.

    Attributes:
        highest: requests per second; a deployment that serves these well is said to do at least that.
        precision: the search ends when the bounds are within this factor.
        requests: sent at each rate.
    """

    targets: Targets
    highest: float
    precision: float
    requests: int
    seed: int


def run(arguments: argparse.Namespace) -> int:
    """Measure and print; exit code 1 when a deployment does not come up or fails a request."""
    try:
        rows = asyncio.run(measure(arguments))
    except (DeploymentError, RefusedError, httpx.HTTPError) as error:
        print(f"pdserve: bench goodput: {error}", file=sys.stderr)
        return 1
    print(json.dumps({"goodput": rows}) if arguments.json else _table(rows))
    return 0


async def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """One row per deployment and workload."""
    targets = Targets(arguments.ttft, arguments.tpot, arguments.share)
    search = Search(targets, arguments.highest_rate, arguments.precision, arguments.requests, arguments.seed)
    results = ResultsFile(arguments.results)
    choice = DeploymentChoice.of(arguments)
    rows = []
    for name in arguments.deployments:
        deployment = make_deployment(name, choice)
        async with running(deployment, arguments.logs) as target:
            rows += [await _find_rate(target, deployment, load, search, results) for load in arguments.workloads]
    return rows


async def _find_rate(
    target: Target, deployment: Deployment, workload: Workload, search: Search, results: ResultsFile
) -> dict[str, Any]:
    """Bisection in the logarithm of the rate: bounds are factors apart, not differences."""
    await drive(target, closed_jobs(2, workload.prompt, workload.output, -1), clients=1, title="warm-up")
    probes: dict[float, float] = {}

    async def serves_well(rate: float) -> bool:
        key = {"deployment": deployment.name, "workload": str(workload), "rate": rate, "requests": search.requests}
        key |= {"seed": search.seed, "ttft_s": search.targets.ttft_s, "tpot_s": search.targets.tpot_s}

        async def probe() -> dict[str, Any]:
            jobs = poisson_jobs(search.requests, rate, workload.prompt, workload.output, search.seed)
            samples, _ = await drive(target, jobs, title=f"{deployment.name} {workload} at {rate:.2f}/s")
            return {"attainment": search.targets.attainment(samples)}

        probes[rate] = (await results.get_or_measure(key, probe))["attainment"]
        return probes[rate] >= search.targets.share

    rate = await bisect_rate(serves_well, search.highest, search.precision)
    return {
        "deployment": deployment.name,
        "workload": str(workload),
        "rate": rate,
        "probes": [{"rate": tried, "attainment": share} for tried, share in sorted(probes.items())],
    }


async def bisect_rate(serves_well: Probe, highest: float, precision: float) -> float:
    """The highest rate found good, 0 when even 1/64 of the highest is not.

    Args:
        serves_well: measures at a rate.
        highest: tried first.
        precision: the answer is within this factor of the limit.
    """
    if await serves_well(highest):
        return highest
    bad, good = highest, 0.0
    for halving in range(1, 7):
        rate = highest / 2**halving
        if await serves_well(rate):
            good = rate
            break
        bad = rate
    while good and bad / good > precision:
        middle = (bad * good) ** 0.5
        if await serves_well(middle):
            good = middle
        else:
            bad = middle
    return good


def _table(rows: Sequence[dict[str, Any]]) -> str:
    lines = [f"{'deployment':24}{'prompt/output':>20}{'requests/s':>12}{'probes':>8}"]
    lines += [f"{r['deployment']:24}{r['workload']:>20}{r['rate']:>12.3f}{len(r['probes']):>8}" for r in rows]
    return "\n".join(lines)
