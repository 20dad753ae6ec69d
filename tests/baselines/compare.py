"""`python -m tests.baselines.compare`: the same trace through both schedulers, side by side.

Prints what each came to over all arrival seeds, the ratio of the makespans, and the share of each switch in the
damage: each switch runs alone, over the first requests of the first seed.

Outputs are halved unless asked otherwise, while prompts are scaled: with both at 1/16 a request draws 21 tokens
after 860, whoever ends frees forty times what it grew by, and hardly anything is ever suspended. Requests are many
enough that the one with the longest output does not decide the makespan (with 200 and whole outputs it does, and
the ratio of one seed moves by 5 % either way).
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from configs import ClusterConfig, SchedulerConfig
from scheduler.central_routing import HAND_EVERYTHING_OVER
from serving.simulation.arrivals import Arrival, TraceScale, read_trace
from serving.simulation.cost_model import CostModel
from serving.simulation.settings import NetworkSettings, SimulationSettings
from tests.baselines.comparison import Outcome, run_side
from tests.baselines.member_run import run_members
from tests.baselines.switches import ALL, INERT, WITH_MEMBERS, Switch

COST = CostModel(step_s=60e-3, context_token_s=8e-6, context_attention_s=0.4e-9, decode_row_s=0.1e-3)
"""Decoding is the bottleneck, so that requests pile up on the generation workers until their pages run short."""

_COUNTS = ("stranded_page_iterations", "audit_violations", "suspensions", "recomputes", "passes")


def parser() -> argparse.ArgumentParser:
    """The options."""
    options = argparse.ArgumentParser(prog="compare", description=__doc__)
    options.add_argument("--trace", type=Path, required=True)
    options.add_argument("--scale", type=int, default=16)
    options.add_argument("--output-scale", type=int, default=2, help="outputs are divided by this; 0: as prompts are")
    options.add_argument("--speed", type=float, default=2.0, help="arrivals come this much faster")
    options.add_argument("--requests", type=int, default=400)
    options.add_argument("--seeds", type=int, default=5, help="arrival seeds, from 0")
    options.add_argument("--context-workers", type=int, default=4)
    options.add_argument("--generation-workers", type=int, default=4)
    options.add_argument("--block-tokens", type=int, default=4)
    options.add_argument("--context-pages", type=int, default=2400)
    options.add_argument("--generation-pages", type=int, default=3000)
    options.add_argument("--host-pages", type=int, default=4000)
    options.add_argument("--batch", type=int, default=128)
    options.add_argument("--audit-every", type=int, default=100, help="passes between audits of a manager")
    options.add_argument("--share-requests", type=int, default=100, help="for each switch alone; 0: leave them out")
    options.add_argument("--json", action="store_true")
    return options


def settings_of(options: argparse.Namespace) -> SimulationSettings:
    """The deployment that both sides run."""
    return SimulationSettings(
        router=HAND_EVERYTHING_OVER,
        cluster=ClusterConfig(context_workers=options.context_workers, generation_workers=options.generation_workers),
        scheduler=SchedulerConfig(max_batch_size=options.batch, max_num_tokens=8192),
        network=NetworkSettings(bytes_per_s=20e9),
        cost=COST,
        tokens_per_block=options.block_tokens,
        pages_per_context_worker=options.context_pages,
        pages_per_generation_worker=options.generation_pages,
        host_pages=options.host_pages,
        audit_every=options.audit_every,
        limit_s=3600.0,
    )


def compare(options: argparse.Namespace) -> dict[str, object]:
    """Run everything; see the module."""
    settings = settings_of(options)
    scale = TraceScale(length=options.scale, output=options.output_scale, speed=options.speed)
    arrivals = [read_trace(options.trace, scale, seed, options.requests) for seed in range(options.seeds)]
    ours, theirs = [], []
    for seed, requests in enumerate(arrivals):
        ours.append(_run(f"seed {seed}, transactional", settings, requests, None))
        theirs.append(_run(f"seed {seed}, try and see", settings, requests, ALL))
    result: dict[str, object] = {
        "transactional": _sum_up(ours),
        "try_and_see": _sum_up(theirs),
        "makespan_ratio": _ratios(ours, theirs),
    }
    if options.share_requests:
        few = read_trace(options.trace, scale, 0, options.share_requests)
        acting = [switch for switch in Switch if switch not in INERT]
        alone = {switch: _run(f"{switch.name} alone", settings, few, {switch}) for switch in acting}
        result["switches"] = shares(alone)
        result["switches_with_members"] = with_members()
        result["inert_switches"] = {switch.name: reason for switch, reason in INERT.items()}
    return result


def with_members() -> dict[str, object]:
    """Ours, and the switches that act only where requests have drafts and adapters, each alone (`member_run.py`)."""
    runs = {"transactional": run_members(0, None)}
    runs |= {switch.name: run_members(0, {switch}) for switch in sorted(WITH_MEMBERS, key=lambda one: one.name)}
    return {name: asdict(outcome) for name, outcome in runs.items()}


def _run(
    name: str,
    settings: SimulationSettings,
    requests: Sequence[Arrival],
    switches: frozenset[Switch] | set[Switch] | None,
) -> Outcome:
    outcome = run_side(settings, requests, switches)
    print(f"{name}: {outcome}", file=sys.stderr, flush=True)
    return outcome


def _sum_up(outcomes: Sequence[Outcome]) -> dict[str, object]:
    """Counts over all seeds, the mean makespan (None when any run did not end), and each run."""
    makespans = [outcome.makespan_s for outcome in outcomes]
    ended = [makespan for makespan in makespans if makespan is not None]
    return {
        **{name: sum(getattr(outcome, name) for outcome in outcomes) for name in _COUNTS},
        "makespan_s": sum(ended) / len(ended) if len(ended) == len(makespans) else None,
        "seeds": [asdict(outcome) for outcome in outcomes],
    }


def _ratios(ours: Sequence[Outcome], theirs: Sequence[Outcome]) -> dict[str, float | None]:
    """Ours over theirs: of the means, and the worst of any seed; runs of theirs that did not end are left out."""
    pairs = [
        (one.makespan_s, other.makespan_s)
        for one, other in zip(ours, theirs, strict=True)
        if one.makespan_s is not None and other.makespan_s is not None
    ]
    if not pairs:
        return {"mean": None, "worst": None}
    mean = sum(one for one, _ in pairs) / sum(other for _, other in pairs)
    return {"mean": mean, "worst": max(one / other for one, other in pairs)}


def shares(alone: Mapping[Switch, Outcome]) -> dict[str, dict[str, object]]:
    """Each switch's part of the damage that the switches do alone."""
    stranded = sum(outcome.stranded_page_iterations for outcome in alone.values())
    violations = sum(outcome.audit_violations for outcome in alone.values())
    return {
        switch.name: {
            "what": switch.value,
            "stranded_page_iterations": outcome.stranded_page_iterations,
            "share_of_stranded": outcome.stranded_page_iterations / stranded if stranded else 0.0,
            "audit_violations": outcome.audit_violations,
            "share_of_violations": outcome.audit_violations / violations if violations else 0.0,
            "suspensions": outcome.suspensions,
            "makespan_s": outcome.makespan_s,
        }
        for switch, outcome in alone.items()
    }


def table(result: Mapping[str, object]) -> str:
    """For people."""
    ours, theirs, ratio = result["transactional"], result["try_and_see"], result["makespan_ratio"]
    assert isinstance(ours, dict)
    assert isinstance(theirs, dict)
    assert isinstance(ratio, dict)
    lines = [f"{'':<26}{'transactional':>16}{'try and see':>16}"]
    lines += [f"{name:<26}{ours[name]!s:>16.10}{theirs[name]!s:>16.10}" for name in (*_COUNTS, "makespan_s")]
    lines.append(f"makespan ratio: mean {ratio['mean']}, worst {ratio['worst']}")
    switches, inert = result.get("switches"), result.get("inert_switches")
    if isinstance(switches, dict) and isinstance(inert, dict):
        lines.append("alone:      stranded  share violations  share")
        for name, row in switches.items():
            numbers = f"{row['stranded_page_iterations']:>16} {row['share_of_stranded']:>6.1%}"
            lines.append(
                f"{name:<4}{numbers} {row['audit_violations']:>9} {row['share_of_violations']:>6.1%}  {row['what']}"
            )
        lines += [f"{name:<4} changes nothing here: {reason}" for name, reason in inert.items()]
        members = result["switches_with_members"]
        assert isinstance(members, dict)
        lines += [f"with drafts, encoder inputs and adapters, {name}: {row}" for name, row in members.items()]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Print JSON or a table."""
    options = parser().parse_args(argv)
    result = compare(options)
    print(json.dumps(result) if options.json else table(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
