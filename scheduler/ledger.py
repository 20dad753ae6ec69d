"""What the central scheduler believes each worker holds, by worker and attempt.

The one place where load is counted: a holding is added once and released once, and the counters of a
worker are the sums over its holdings at all times (`audit`). Refuses to know why a holding changes.
"""

from collections import Counter, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from manager import Epoch, LogicError, WorkerName
from scheduler.introductions import HoldingKind
from scheduler.messages import WorkerHeartbeat, WorkerRegistration, WorkerRole
from scheduler.router import WorkerLoad
from scheduler.spec import AttemptId

_MAX_LOSSES = 64


@dataclass(slots=True)
class Holding:
    """One attempt's part on one worker.

    Attributes:
        kind: what is held. A LEASE is no load.
        num_tokens: positions counted against the worker.
        sequence: the command batch that last told the worker of it.
        since_s: when that was.
        is_ending: a cancel was sent and not answered yet.
        sightings: heartbeats in a row whose account differs from this.
    """

    kind: HoldingKind
    num_tokens: int
    sequence: int
    since_s: float
    is_ending: bool = False
    sightings: int = 0


@dataclass(slots=True)
class WorkerRecord:
    """One worker, live or lost.

    Attributes:
        registration: its present (or last) life.
        heard_at_s: last heartbeat or registration.
        vouched_at_s: when the supervisor last saw its process run.
        progress_at_s: when its iteration number last moved, or did not have to.
        heartbeat: the last one of this life.
        lost_reason: empty while it lives.
        lost_at_s: when it was lost.
        holdings: what it holds.
        strangers: attempts of its account that the ledger lacks -> heartbeats in a row.
    """

    registration: WorkerRegistration
    heard_at_s: float
    progress_at_s: float
    vouched_at_s: float = float("-inf")
    heartbeat: WorkerHeartbeat | None = None
    lost_reason: str = ""
    lost_at_s: float = 0.0
    holdings: dict[AttemptId, Holding] = field(default_factory=dict)
    strangers: dict[AttemptId, int] = field(default_factory=dict)
    num_attempts: int = 0
    num_tokens: int = 0

    @property
    def worker(self) -> WorkerName:
        """Its name."""
        return self.registration.worker

    @property
    def is_live(self) -> bool:
        """Whether it may be given work."""
        return not self.lost_reason

    @property
    def load(self) -> WorkerLoad:
        """What a router sees."""
        return WorkerLoad(self.worker, self.num_attempts, self.num_tokens)

    def num_held(self, kind: HoldingKind) -> int:
        """Holdings of one kind, ending ones included."""
        return sum(holding.kind is kind for holding in self.holdings.values())


@dataclass(frozen=True, slots=True)
class WorkerLoss:
    """A life that was given up."""

    worker: WorkerName
    pid: int
    reason: str
    at_s: float


class Ledger:
    """Every worker of this term and what it holds.

    Attributes:
        losses: the last lives that were lost, oldest first.
    """

    def __init__(self) -> None:
        """Empty: a new term knows nobody."""
        self._records: dict[WorkerName, WorkerRecord] = {}
        self._past_counters: Counter[str] = Counter()
        self.losses: deque[WorkerLoss] = deque(maxlen=_MAX_LOSSES)

    # -- workers -----------------------------------------------------------------------------------

    def add_worker(self, registration: WorkerRegistration, now_s: float) -> None:
        """Begin a life. Raises LogicError while an earlier one is live."""
        previous = self._records.get(registration.worker)
        if previous is not None:
            if previous.is_live:
                msg = f"worker {previous.worker} epoch {previous.registration.epoch} is still live"
                raise LogicError(msg)
            self._past_counters.update(account_counters(previous))
        self._records[registration.worker] = WorkerRecord(registration, heard_at_s=now_s, progress_at_s=now_s)

    def lose_worker(self, worker: WorkerName, reason: str, now_s: float) -> None:
        """End a life: it holds nothing any more, and is remembered until its next one."""
        record = self._records[worker]
        record.lost_reason = reason
        record.lost_at_s = now_s
        self.losses.append(WorkerLoss(worker, record.registration.pid, reason, now_s))
        record.holdings.clear()
        record.strangers.clear()
        record.num_attempts = record.num_tokens = 0

    def record(self, worker: WorkerName) -> WorkerRecord | None:
        """The worker's present or last life."""
        return self._records.get(worker)

    def live(self, worker: WorkerName, epoch: Epoch) -> WorkerRecord | None:
        """The worker if it lives and this is its life."""
        record = self._records.get(worker)
        if record is None or not record.is_live or record.registration.epoch != epoch:
            return None
        return record

    def is_live(self, worker: WorkerName) -> bool:
        """Whether some life of it is live."""
        record = self._records.get(worker)
        return record is not None and record.is_live

    def known(self, role: WorkerRole) -> list[WorkerRecord]:
        """Workers of a role, live or lost."""
        return [record for record in self._records.values() if record.registration.role is role]

    def workers(self, *roles: WorkerRole) -> list[WorkerRecord]:
        """Live workers of these roles, in order of first registration."""
        return [record for record in self._records.values() if record.is_live and record.registration.role in roles]

    def needed_roles(self) -> tuple[WorkerRole, ...]:
        """The roles without which nothing finishes in this deployment."""
        known = {record.registration.role for record in self._records.values()}
        is_mixed = self.workers(WorkerRole.MIXED) or known == {WorkerRole.MIXED}
        return (WorkerRole.MIXED,) if is_mixed else (WorkerRole.CONTEXT, WorkerRole.GENERATION)

    def missing_roles(self) -> tuple[WorkerRole, ...]:
        """Of the needed roles, those without a live worker."""
        return tuple(role for role in self.needed_roles() if not self.workers(role))

    def __iter__(self) -> Iterator[WorkerRecord]:
        """Every worker, live or lost, in order of first registration."""
        return iter(self._records.values())

    # -- holdings ----------------------------------------------------------------------------------

    def add(self, worker: WorkerName, attempt_id: AttemptId, holding: Holding) -> None:
        """A command gave the worker a part of an attempt. Raises LogicError when it has one already."""
        record = self._records[worker]
        if attempt_id in record.holdings:
            msg = f"worker {worker} holds {attempt_id} already, as {record.holdings[attempt_id].kind}"
            raise LogicError(msg)
        record.holdings[attempt_id] = holding
        self._count(record, holding, 1)

    def holding(self, worker: WorkerName, attempt_id: AttemptId) -> Holding | None:
        """What the worker holds of the attempt."""
        record = self._records.get(worker)
        return record.holdings.get(attempt_id) if record is not None else None

    def change(self, worker: WorkerName, attempt_id: AttemptId, kind: HoldingKind) -> None:
        """The part became another kind (an offer a reservation, a context a lease)."""
        record = self._records[worker]
        holding = record.holdings[attempt_id]
        self._count(record, holding, -1)
        holding.kind = kind
        self._count(record, holding, 1)

    def release(self, worker: WorkerName, attempt_id: AttemptId) -> Holding | None:
        """The part is gone; returns it, or None when there was none."""
        record = self._records.get(worker)
        holding = record.holdings.pop(attempt_id, None) if record is not None else None
        if record is not None and holding is not None:
            self._count(record, holding, -1)
        return holding

    @staticmethod
    def _count(record: WorkerRecord, holding: Holding, sign: int) -> None:
        if holding.kind is not HoldingKind.LEASE:
            record.num_attempts += sign
            record.num_tokens += sign * holding.num_tokens

    # -- accounts ----------------------------------------------------------------------------------

    def worker_counters(self) -> Counter[str]:
        """Cumulative counters that workers reported, earlier lives included."""
        total = Counter(self._past_counters)
        for record in self._records.values():
            total.update(account_counters(record))
        return total

    def audit(self) -> None:
        """Recompute every worker's load. Raises LogicError where a counter differs."""
        for record in self._records.values():
            loads = [holding for holding in record.holdings.values() if holding.kind is not HoldingKind.LEASE]
            expected = (len(loads), sum(holding.num_tokens for holding in loads))
            if (record.num_attempts, record.num_tokens) != expected:
                msg = f"worker {record.worker}: counted {record.load}, its holdings sum to {expected}"
                raise LogicError(msg)
            if record.holdings and not record.is_live:
                msg = f"worker {record.worker} is lost and still holds {list(record.holdings)}"
                raise LogicError(msg)


def account_counters(record: WorkerRecord) -> Mapping[str, int]:
    """The counters of a worker's last account; those of its manager where the account has none."""
    if record.heartbeat is None:
        return {}
    snapshot = record.heartbeat.snapshot
    manager = {"rollbacks": snapshot.stats.rollbacks, "suspensions": snapshot.stats.suspensions}
    return {**manager, **snapshot.counters}
