"""What the central scheduler has to say: one batch per receiver, in order.

Refuses to know how messages travel. Every batch to a worker is numbered within the worker's life, so
that a worker's account of itself can name the last one it has handled; only then may a difference
between the account and the ledger be trusted (`scheduler.reconcile`).
"""

from dataclasses import dataclass, field

from manager import Epoch, WorkerName
from scheduler.messages import CommandBatch, DoorNotice, WorkerCommand
from scheduler.spec import DoorName, Term


@dataclass(frozen=True, slots=True)
class SendToWorker:
    """Deliver `batch` to the life `epoch` of `worker`, and to no later one."""

    worker: WorkerName
    batch: CommandBatch
    epoch: Epoch


@dataclass(frozen=True, slots=True)
class NotifyDoor:
    """Deliver `notices` to `door`, which refuses them below the highest term it knows."""

    door: DoorName
    notices: tuple[DoorNotice, ...]
    term: Term


@dataclass(frozen=True, slots=True)
class AskWorker:
    """Ask `worker`, whatever its life, to introduce itself to `term` (C6)."""

    worker: WorkerName
    term: Term


@dataclass(frozen=True, slots=True)
class AskDoor:
    """Ask `door` to claim its open requests under `term` (C6)."""

    door: DoorName
    term: Term


CentralCommand = SendToWorker | NotifyDoor | AskWorker | AskDoor


@dataclass(slots=True)
class _Lane:
    """Commands to one life of one worker."""

    epoch: Epoch
    sequence: int = 0
    commands: list[WorkerCommand] = field(default_factory=list)


class Outbox:
    """Collects commands and notices until `take`.

    Attributes:
        term: what is sent under; raised before anything is sent (C6).
    """

    def __init__(self, term: Term) -> None:
        """Send under `term`."""
        self.term = term
        self._asked_workers: dict[WorkerName, None] = {}
        self._asked_doors: dict[DoorName, None] = {}
        self._lanes: dict[WorkerName, _Lane] = {}
        self._notices: dict[DoorName, list[DoorNotice]] = {}

    def open(self, worker: WorkerName, epoch: Epoch) -> None:
        """Start a worker's lane afresh, for this life."""
        self._lanes[worker] = _Lane(epoch)

    def close(self, worker: WorkerName) -> None:
        """Drop what was not taken yet: nobody is left to read it."""
        self._lanes.pop(worker, None)

    def send(self, worker: WorkerName, command: WorkerCommand) -> int:
        """Add a command for an open lane; returns the sequence number of the batch it will be in."""
        lane = self._lanes[worker]
        lane.commands.append(command)
        return lane.sequence + 1

    def notify(self, door: DoorName, notice: DoorNotice) -> None:
        """Add a notice."""
        self._notices.setdefault(door, []).append(notice)

    def drop_door(self, door: DoorName) -> None:
        """Forget a door's notices: it is gone."""
        self._notices.pop(door, None)

    def ask_worker(self, worker: WorkerName) -> None:
        """Have a worker introduce itself."""
        self._asked_workers[worker] = None

    def ask_door(self, door: DoorName) -> None:
        """Have a door claim what it owns."""
        self._asked_doors[door] = None

    def take(self) -> tuple[CentralCommand, ...]:
        """Everything since the last call, one entry per receiver."""
        taken: list[CentralCommand] = [AskWorker(worker, self.term) for worker in self._asked_workers]
        taken += [AskDoor(door, self.term) for door in self._asked_doors]
        self._asked_workers, self._asked_doors = {}, {}
        for worker, lane in self._lanes.items():
            if lane.commands:
                lane.sequence += 1
                batch = CommandBatch(self.term, tuple(lane.commands), lane.sequence)
                lane.commands = []
                taken.append(SendToWorker(worker, batch, lane.epoch))
        taken += [NotifyDoor(door, tuple(notices), self.term) for door, notices in self._notices.items()]
        self._notices = {}
        return tuple(taken)
