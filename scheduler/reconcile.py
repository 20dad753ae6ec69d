"""Compares the ledger with a worker's own account (C6): what differs twice in a row is a divergence.

    ledger holds it   account lists it   meaning
    yes               no                 MISSING: a finish was lost, or the worker forgot it
    yes, ending       yes                STILL_HELD: a cancel was lost
    no                yes                STRANGER: an attempt of another term, or an orphan

One sighting proves nothing, since a report may be under way. Nor does any number of them before the
worker has handled the command that gave (or cancelled) the part: its account says how far it is
(`commands_seen`). Where it never gets there, `grace_s` bounds the wait, less the time of the step that it is busy
with: the command was lost. Leases are
the worker's own to list or not, and end by themselves: one that is not listed is dropped from the ledger
in silence.

Refuses to know how a divergence is repaired.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from manager import WorkerName
from scheduler.introductions import HoldingKind
from scheduler.ledger import Holding, Ledger, WorkerRecord
from scheduler.messages import WorkerHeartbeat
from scheduler.spec import AttemptId, Term

_SIGHTINGS = 2


class DivergenceKind(StrEnum):
    """How the ledger and an account differ."""

    MISSING = "missing"
    STILL_HELD = "still_held"
    STRANGER = "stranger"


@dataclass(frozen=True, slots=True)
class Divergence:
    """One difference that persisted; the caller repairs and logs it."""

    worker: WorkerName
    attempt_id: AttemptId
    kind: DivergenceKind
    message: str


@dataclass(frozen=True, slots=True)
class AccountReader:
    """How much of the ledger an account may be held against.

    Attributes:
        term: ours.
        grace_s: how long a worker is given that does not say that it has handled a command.
    """

    term: Term
    grace_s: float

    def has_handled(self, heartbeat: WorkerHeartbeat, holding: Holding, now_s: float) -> bool:
        """Whether the account was made after the worker learned of this holding's last command."""
        seen = heartbeat.snapshot.commands_seen
        has_seen = seen is not None and seen >= (self.term, holding.sequence)
        # Busy with one long step it has not looked at its commands yet; a step without end is for liveness to judge.
        return has_seen or now_s - holding.since_s - heartbeat.busy_s >= self.grace_s


def reconcile(
    ledger: Ledger, record: WorkerRecord, heartbeat: WorkerHeartbeat, reader: AccountReader, now_s: float
) -> Sequence[Divergence]:
    """Hold one account against the ledger; mutates the counts of sightings only, and forgotten leases."""
    listed = {*heartbeat.snapshot.running, *heartbeat.snapshot.waiting}
    found: list[Divergence] = []
    for attempt_id, holding in list(record.holdings.items()):
        kind = _difference(holding, is_listed=attempt_id in listed)
        if kind is None or not reader.has_handled(heartbeat, holding, now_s):
            holding.sightings = 0
            continue
        holding.sightings += 1
        if holding.sightings < _SIGHTINGS:
            continue
        holding.sightings = 0
        if holding.kind is HoldingKind.LEASE and kind is DivergenceKind.MISSING:
            ledger.release(record.worker, attempt_id)
            continue
        detail = f"worker {record.worker}, attempt {attempt_id}: ledger has {holding.kind}, {kind} in its account"
        found.append(Divergence(record.worker, attempt_id, kind, detail))
    return [*found, *_strangers(record, listed)]


def _difference(holding: Holding, *, is_listed: bool) -> DivergenceKind | None:
    if not is_listed:
        return DivergenceKind.MISSING
    is_overdue = holding.is_ending and holding.kind is not HoldingKind.LEASE
    return DivergenceKind.STILL_HELD if is_overdue else None


def _strangers(record: WorkerRecord, listed: set[AttemptId]) -> list[Divergence]:
    found: list[Divergence] = []
    sightings: dict[AttemptId, int] = {}
    for attempt_id in sorted(listed - record.holdings.keys()):
        seen = record.strangers.get(attempt_id, 0) + 1
        if seen < _SIGHTINGS:
            sightings[attempt_id] = seen
            continue
        detail = f"worker {record.worker} lists attempt {attempt_id}, which the ledger does not give it"
        found.append(Divergence(record.worker, attempt_id, DivergenceKind.STRANGER, detail))
    record.strangers = sightings
    return found
