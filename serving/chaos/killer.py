"""Who is killed or stopped when, from a seed, and how soon the server noticed."""

import asyncio
import contextlib
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

TARGETS = ("context", "generation", "central")
_SIGNALS = (signal.SIGKILL, signal.SIGSTOP)
_POLL_S = 0.2
_STATE_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class Blow:
    """One planned fault."""

    at_s: float
    target: str
    signal: signal.Signals


def plan_blows(seed: int, duration_s: float, least: int) -> list[Blow]:
    """Every kind of target by every kind of signal, `least` times each, spread over the time in random order."""
    draw = random.Random(f"blows {seed}")
    kinds = [(target, how) for target in TARGETS for how in _SIGNALS] * least
    draw.shuffle(kinds)
    step_s = duration_s / (len(kinds) + 1)
    return [
        Blow((index + 1 + draw.uniform(-0.2, 0.2)) * step_s, target, how) for index, (target, how) in enumerate(kinds)
    ]


@dataclass(slots=True)
class ServerView:
    """What /cluster/state said, over all terms.

    Attributes:
        state: the last answer.
        lost_at_s: pid -> when the central scheduler gave that worker up, on this host's monotonic clock.
        divergences: of each term.
        alive_at_s: role -> when a worker of it was last seen to live.
        looked_at_s: when that was last looked at.
    """

    client: httpx.AsyncClient
    state: Mapping[str, Any] = field(default_factory=dict)
    lost_at_s: dict[int, float] = field(default_factory=dict)
    divergences: dict[int, int] = field(default_factory=dict)
    alive_at_s: dict[str, float] = field(default_factory=dict)
    looked_at_s: float = 0.0
    refused_terms: int = 0

    async def look(self) -> bool:
        """Ask once; whether there was an answer."""
        try:
            answer = await self.client.get("/cluster/state", timeout=_STATE_TIMEOUT_S)
        except httpx.HTTPError:
            return False
        if answer.status_code != httpx.codes.OK:
            return False
        now_s = time.monotonic()
        self.state = answer.json()
        central, counters = self.state["central"], self.state["counters"]
        for loss in central["losses"]:
            self.lost_at_s.setdefault(loss["pid"], now_s - loss["s_ago"])
        self.looked_at_s = now_s
        self.alive_at_s |= {w["role"]: now_s for w in self.state["workers"] if w["state"] == "running"}
        self.divergences[central["term"]] = counters["divergences"]
        self.refused_terms = max(self.refused_terms, counters["refused_terms"])
        return True

    async def keep_looking(self) -> None:
        """Until it is cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(_POLL_S)

    def dead_s(self) -> float:
        """How long, at the last look, some role had had no worker that lives."""
        return self.looked_at_s - min(self.alive_at_s.values(), default=self.looked_at_s)

    def live_pids(self, role: str) -> list[int]:
        """Workers of a role that run."""
        workers = self.state.get("workers", ())
        return [worker["pid"] for worker in workers if worker["role"] == role and worker["state"] == "running"]


class Killer:
    """Carries blows out.

    Attributes:
        kills: how many of each kind were carried out.
        detections_s: from the blow to the loss of the worker.
    """

    def __init__(self, view: ServerView, stop_s: float, seed: int) -> None:
        """Args.

        view: of the server.
        stop_s: a stopped process is woken up again after so long, if it is still there.
        seed: chooses among workers of a role.
        """
        self._view = view
        self._stop_s = stop_s
        self._draw = random.Random(f"killer {seed}")
        self._waking: list[asyncio.Task[None]] = []
        self._struck_at_s: dict[int, float] = {}
        self.kills: Counter[str] = Counter()

    async def run(self, blows: list[Blow]) -> None:
        """Strike at the planned times, or later: a role's last worker is left alone until another one runs."""
        started_s = time.monotonic()
        for blow in blows:
            await asyncio.sleep(max(0.0, started_s + blow.at_s - time.monotonic()))
            has_struck = False
            while not has_struck:
                has_struck = await self._strike(blow)
                await asyncio.sleep(_POLL_S)
        await asyncio.gather(*self._waking)

    @property
    def detections_s(self) -> list[float]:
        """From each blow against a worker to its loss."""
        lost = self._view.lost_at_s
        return [lost[pid] - at_s for pid, at_s in self._struck_at_s.items() if pid in lost]

    async def _strike(self, blow: Blow) -> bool:
        if not await self._view.look() or self._view.state["central"]["is_taking_over"]:
            return False
        if blow.target == "central":
            pid = self._view.state["central"]["pid"]
        else:
            pids = self._view.live_pids(blow.target)
            if len(pids) < 2:
                return False
            pid = self._draw.choice(pids)
            self._struck_at_s[pid] = time.monotonic()
        os.kill(pid, blow.signal)
        self.kills[f"{blow.target} {blow.signal.name}"] += 1
        if blow.signal is signal.SIGSTOP:
            self._waking.append(asyncio.create_task(self._wake(pid)))
        return True

    async def _wake(self, pid: int) -> None:
        await asyncio.sleep(self._stop_s)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
