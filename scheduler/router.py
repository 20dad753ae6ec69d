"""Which worker gets a request: what a routing policy is asked, and what it sees.

A router sees only workers that are live, have room and are large enough; it never decides whether a
request runs, only where. It holds no count of its own (the ledger and the prefix index do), so nothing in
it can drift.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from manager import WorkerName


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """What the books hold against one worker, and for it.

    Attributes:
        worker: its name.
        num_attempts: attempts that it computes, or was offered; leases are not counted.
        num_tokens: positions of those attempts; of contexts, those that were not cached.
        num_cached_tokens: tokens of the request in question that it is believed to have cached.
    """

    worker: WorkerName
    num_attempts: int = 0
    num_tokens: int = 0
    num_cached_tokens: int = 0


class Router(Protocol):
    """A routing policy."""

    def choose(self, candidates: Sequence[WorkerLoad]) -> WorkerLoad:
        """One of the candidates, of which there is at least one. Called once per dispatch, in order."""
        ...


class LeastTokensRouter:
    """The worker with the fewest tokens outstanding; ties go to fewer attempts, then to the name."""

    def choose(self, candidates: Sequence[WorkerLoad]) -> WorkerLoad:
        """See `Router`."""
        return min(candidates, key=_load)


def _load(load: WorkerLoad) -> tuple[int, int, str]:
    return load.num_tokens, load.num_attempts, load.worker
