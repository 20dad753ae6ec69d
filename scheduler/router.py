"""Which worker gets a request: policies over a snapshot of loads.

A router sees only workers that are live, have room and are large enough; it never decides whether a
request runs, only where. It holds no count of its own (the ledger does), so nothing in it can drift.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from manager import WorkerName
from scheduler.spec import RequestSpec


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """What the ledger holds against one worker.

    Attributes:
        worker: its name.
        num_attempts: attempts that it computes, or was offered; leases are not counted.
        num_tokens: positions of those attempts.
    """

    worker: WorkerName
    num_attempts: int = 0
    num_tokens: int = 0


class Router(Protocol):
    """A routing policy."""

    def choose(self, spec: RequestSpec, candidates: Sequence[WorkerLoad]) -> WorkerName:
        """One of the candidates, of which there is at least one. Called once per dispatch, in order."""
        ...


class LeastTokensRouter:
    """The worker with the fewest tokens outstanding; ties go to fewer attempts, then to the name."""

    def choose(self, spec: RequestSpec, candidates: Sequence[WorkerLoad]) -> WorkerName:
        """See `Router`; the request itself plays no part."""
        del spec
        best = min(candidates, key=lambda load: (load.num_tokens, load.num_attempts, load.worker))
        return best.worker
