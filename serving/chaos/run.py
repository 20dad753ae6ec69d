"""One chaos run: solo runs first, then streams under fire, then the accounts.

Every job is run alone once, and again and again while processes die; the text and the number of its tokens must
be the same each time. Whatever is left afterwards (pages, divergences, audits) is counted.
"""

import asyncio
import json
import random
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from configs import load_deployment
from serving.chaos.jobs import Job, Stream, make_jobs, percentile, run_job
from serving.chaos.killer import Killer, ServerView, plan_blows
from serving.chaos.server import Server, running_server

_TIMEOUT_S = 600.0
_SETTLE_S = 60.0
_ABORT_SHARE = 0.15
_SHOWN = 5
_GAP_PARTS = ("silent_s", "resubmit_s", "resume_s", "hand_over_s")


@dataclass(frozen=True, slots=True)
class ChaosPlan:
    """What to do.

    Attributes:
        config: the deployment's file.
        log_file: takes the server's log.
        timelines_file: takes one line of JSON for each stream that lost an attempt, where given.
        streams: at a time.
        least: times that each kind of target suffers each kind of signal.
        stop_s: how long a stopped process sleeps.
    """

    config: Path
    log_file: Path
    seconds: float
    seed: int
    streams: int = 16
    num_jobs: int = 12
    output_tokens: int = 48
    least: int = 3
    stop_s: float = 10.0
    timelines_file: Path | None = None


def run_chaos(plan: ChaosPlan) -> dict[str, Any]:
    """Do it; returns the report, ready for JSON. Raises RuntimeError when the server does not start."""
    with running_server(plan.config, plan.log_file) as server:
        return asyncio.run(_Run(plan, server).run())


class _Run:
    def __init__(self, plan: ChaosPlan, server: Server) -> None:
        self._plan = plan
        self._server = server
        self._draw = random.Random(f"clients {plan.seed}")
        self._jobs = make_jobs(plan.seed, plan.num_jobs, plan.output_tokens)
        self._solo: dict[Job, Stream] = {}
        self._streams: list[Stream] = []
        self._view: ServerView
        self._grace_s = load_deployment(str(plan.config)).central.restart_grace_s

    async def run(self) -> dict[str, Any]:
        """See the module."""
        limits = httpx.Limits(max_connections=4 * self._plan.streams)
        async with httpx.AsyncClient(base_url=self._server.url, timeout=_TIMEOUT_S, limits=limits) as client:
            for job in self._jobs:
                self._solo[job] = await run_job(client, self._server.model, job)
                if self._solo[job].error:
                    msg = f"a solo run failed: {self._solo[job].error}"
                    raise RuntimeError(msg)
            view = self._view = ServerView(client)
            killer = Killer(view, self._plan.stop_s, self._plan.seed)
            looking = asyncio.create_task(view.keep_looking())
            blows = plan_blows(self._plan.seed, self._plan.seconds, self._plan.least)
            striking = asyncio.create_task(killer.run(blows))
            end_s = time.monotonic() + self._plan.seconds
            await asyncio.gather(*(self._client(client, end_s, striking) for _ in range(self._plan.streams)))
            await striking
            leaked = await self._settle(view)
            looking.cancel()
            return self._report(view, killer, leaked)

    async def _client(self, client: httpx.AsyncClient, end_s: float, striking: "asyncio.Task[None]") -> None:
        """One stream after the other, until the time is over and the last blow was struck."""
        while time.monotonic() < end_s or not striking.done():
            job = self._draw.choice(self._jobs)
            is_leaving = self._draw.random() < _ABORT_SHARE
            abort_after = self._draw.randint(1, max(1, job.max_tokens // 2)) if is_leaving else None
            stream = await run_job(client, self._server.model, job, abort_after)
            self._streams.append(stream)
            if stream.error:
                # By what was seen of the workers, not by what the error says: that may be wrong itself.
                stream.is_role_dead = self._view.dead_s() > self._grace_s
                print(f"chaos: {stream.error}", file=sys.stderr)
                await asyncio.sleep(0.2)

    async def _settle(self, view: ServerView) -> int:
        """Wait for the baseline; returns the pages that are still away from it."""
        deadline_s = time.monotonic() + _SETTLE_S
        leaked = -1
        while time.monotonic() < deadline_s:
            if await view.look():
                leaked = _pages_held(view.state)
                states = {worker["state"] for worker in view.state["workers"]}
                if not leaked and states == {"running"}:
                    return 0
            await asyncio.sleep(0.5)
        return leaked

    def _report(self, view: ServerView, killer: Killer, leaked: int) -> dict[str, Any]:
        whole = [stream for stream in self._streams if not stream.is_aborted and not stream.error]
        wrong = [stream for stream in whole if not self._is_as_alone(stream)]
        for stream in wrong[:_SHOWN]:
            print(f"chaos: wrong tokens: {self._difference(stream)}", file=sys.stderr)
        gaps = [gap_s for stream in whole for gap_s in stream.own_gaps_s]
        parts = [recovery for stream in whole for recovery in stream.timeline.get("recoveries", ())]
        self._write_timelines(whole)
        violations = self._server.violations()
        for line in violations[:_SHOWN]:
            print(f"chaos: {line}", file=sys.stderr)
        return {
            "streams": len(self._streams),
            "aborted": sum(stream.is_aborted for stream in self._streams),
            "errors": sum(bool(stream.error) and not stream.is_role_dead for stream in self._streams),
            "errors_no_role_alive": sum(stream.is_role_dead for stream in self._streams),
            "wrong_tokens": len(wrong),
            "kills": dict(sorted(killer.kills.items())),
            "pages_leaked": leaked,
            "audit_violations": len(violations),
            "audits": sum(worker["counters"].get("audits", 0) for worker in view.state["workers"]),
            "reconcile_repairs": sum(view.divergences.values()),
            "resubmitted_streams": sum(bool(stream.num_resubmissions) for stream in whole),
            "interruptions": len(gaps),
            "detection_p99_s": percentile(killer.detections_s, 0.99),
            "gap_p50_s": percentile(gaps, 0.5),
            "gap_p99_s": percentile(gaps, 0.99),
            "gap_parts_p99_s": {name: _part_p99_s(parts, name) for name in _GAP_PARTS},
        }

    def _write_timelines(self, streams: Sequence[Stream]) -> None:
        """Of those that lost an attempt, so that a long gap can be looked into."""
        if self._plan.timelines_file is not None:
            interrupted = (stream.timeline for stream in streams if stream.timeline.get("recoveries"))
            self._plan.timelines_file.write_text("".join(f"{json.dumps(timeline)}\n" for timeline in interrupted))

    def _difference(self, stream: Stream) -> str:
        """Where a stream left the way of its solo run, and who computed it."""
        solo = self._solo[stream.job]
        common = next(
            (n for n, (a, b) in enumerate(zip(stream.text, solo.text, strict=False)) if a != b), len(solo.text)
        )
        way = [f"{part['worker']} {part['attempt']}" for part in stream.timeline.get("workers", ())]
        return (
            f"job {self._jobs.index(stream.job)} differs after {common} of {len(solo.text)} characters "
            f"({stream.num_tokens} tokens, alone {solo.num_tokens}); computed by {', '.join(way)}"
        )

    def _is_as_alone(self, stream: Stream) -> bool:
        solo = self._solo[stream.job]
        return (stream.text, stream.num_tokens) == (solo.text, solo.num_tokens)


def _part_p99_s(recoveries: Sequence[Mapping[str, Any]], name: str) -> float:
    return percentile([part[name] for part in recoveries if part[name] is not None], 0.99)


def _pages_held(state: Any) -> int:
    held = 0
    for worker in state["workers"]:
        held += worker["ledger"]["attempts"] + worker["ledger"]["leases"]
        held += sum(pages["total"] - pages["free"] - pages["cached"] for pages in worker["pages"].values())
    return held
