"""The first moments of a term: who must be heard before anything is dispatched (C6).

    ask every worker and door ─► introductions and claims arrive ─► all live ones have answered ─► adopt
                                                               └── or `patience_s` is over ────────┘

A worker or door that neither beats nor answers within `silence_s` is not live and is not waited for.
Collects only; `scheduler.adoption` decides what becomes of the parts.
"""

from collections.abc import Collection
from dataclasses import dataclass, field

from manager import WorkerName
from scheduler.introductions import AttemptPart
from scheduler.spec import AttemptId, DoorName


@dataclass(slots=True)
class Takeover:
    """What a new term has heard so far.

    Attributes:
        workers: those that should exist.
        num_doors: how many doors should exist; their names change with every life.
        began_s: when it asked.
        silence_s: who was not heard by then is not live.
        patience_s: who has not answered by then is not waited for.
        parts: what introduced workers hold: (worker, part), in order of introduction.
    """

    workers: Collection[WorkerName]
    num_doors: int
    began_s: float
    silence_s: float
    patience_s: float
    parts: list[tuple[WorkerName, AttemptPart]] = field(default_factory=list)
    _heard_workers: set[WorkerName] = field(default_factory=set)
    _introduced: set[WorkerName] = field(default_factory=set)
    _heard_doors: set[DoorName] = field(default_factory=set)
    _claimed: set[DoorName] = field(default_factory=set)

    def hear_worker(self, worker: WorkerName) -> None:
        """It beats, so it lives."""
        self._heard_workers.add(worker)

    def introduce(self, worker: WorkerName, parts: Collection[AttemptPart]) -> None:
        """It has said what it holds. A later life of the name replaces an earlier one."""
        self.parts = [entry for entry in self.parts if entry[0] != worker]
        self.parts += [(worker, part) for part in parts]
        self._introduced.add(worker)

    def lose_worker(self, worker: WorkerName) -> None:
        """It died in the middle: nothing of it is left to adopt."""
        self.introduce(worker, ())

    def hear_door(self, door: DoorName) -> None:
        """It beats, so it lives."""
        self._heard_doors.add(door)

    def claim(self, door: DoorName) -> None:
        """It has said what it owns."""
        self._claimed.add(door)

    def is_complete(self, now_s: float) -> bool:
        """Whether nobody is left to wait for."""
        elapsed_s = now_s - self.began_s
        if elapsed_s >= self.patience_s:
            return True
        if elapsed_s >= self.silence_s:
            return self._heard_workers <= self._introduced and self._heard_doors <= self._claimed
        return self._introduced.issuperset(self.workers) and len(self._claimed) >= self.num_doors


def attempt_age(attempt_id: AttemptId) -> tuple[int, int]:
    """Sorts attempts by term and counter; one whose name is no attempt's is older than all."""
    term, _, counter = attempt_id.partition(".")
    return (int(term), int(counter)) if term.isdigit() and counter.isdigit() else (-1, -1)
