"""What a worker says of itself to a central scheduler that does not know it (C6). Frozen values only."""

from dataclasses import dataclass
from enum import StrEnum

from scheduler.messages import Handoff, WorkerRegistration
from scheduler.spec import AttemptId, RequestUid, Term


class HoldingKind(StrEnum):
    """What a worker holds of an attempt."""

    CONTEXT = "context"
    LEASE = "lease"
    OFFER = "offer"
    TRANSFER = "transfer"
    GENERATION = "generation"
    LOCAL = "local"


@dataclass(frozen=True, slots=True)
class AttemptPart:
    """What one worker holds of one attempt, in its own words.

    Attributes:
        uid: the request.
        num_tokens: positions that the part counts for.
        handoff: of a lease, the ticket that it gave; of an offer or a transfer, the one that it has.
    """

    attempt_id: AttemptId
    uid: RequestUid
    kind: HoldingKind
    num_tokens: int
    handoff: Handoff | None = None


@dataclass(frozen=True, slots=True)
class WorkerIntroduction:
    """A worker's answer to a central scheduler that does not know it: itself, and all that it holds (C6).

    Attributes:
        registration: who it is.
        term: highest term that it had seen before it was asked.
        reports_sent: number of the last ReportBatch whose effects are in `parts`.
        parts: everything it holds or has queued.
    """

    registration: WorkerRegistration
    term: Term
    reports_sent: int
    parts: tuple[AttemptPart, ...]
