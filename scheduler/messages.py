"""Everything that crosses a process border between doors, the central scheduler and workers.

Frozen values only, picklable, no behaviour. One message a step and receiver: batches are tuples.

    door    -> central   submit(specs), cancel(uid)
    central -> door      DoorNotice
    central -> worker    CommandBatch of WorkerCommand, refused below the highest known term (C6)
    worker  -> central   ReportBatch of WorkerReport, and WorkerHeartbeat
                         WorkerIntroduction (introductions.py), when a new term asks for it
    door    -> central   claim(open requests), when a new term asks for it
    worker  -> door      TokenBatch of TokenEvent, straight, never through the central scheduler
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from manager import Epoch, LeaseId, ManagerStats, WorkerName
from scheduler.durations import PhaseDurations
from scheduler.prefix_changes import PrefixesChanged
from scheduler.spec import AttemptId, DoorName, FinishReason, Follower, RequestSpec, RequestUid, Term, TokenLogprobs
from scheduler.tickets import ContextPart, DeliverPart
from scheduler.tickets import Ticket as Ticket  # part of the messages' vocabulary


class WorkerRole(StrEnum):
    """What a worker computes."""

    CONTEXT = "context"
    GENERATION = "generation"
    MIXED = "mixed"


@dataclass(frozen=True, slots=True)
class Handoff:
    """A finished context: its pages (by ticket) and the token drawn from its last logits (C4)."""

    ticket: Ticket
    first_token_id: int


class ErrorKind(StrEnum):
    """Why a request failed; the door maps it to a status (api/errors.py)."""

    INVALID = "invalid"
    NEVER_FITS = "never_fits"
    QUEUE_FULL = "queue_full"
    NO_WORKER = "no_worker"
    ENGINE = "engine"
    TRANSFER = "transfer"
    WORKER_LOST = "worker_lost"
    DEADLINE = "deadline"
    INTERNAL = "internal"


# -- central -> worker ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RunContext:
    """Compute the prompt, draw the first token, lease the pages. Context workers.

    Attributes:
        has_reader: a generation worker has a place for the pages and reads them as they are computed.
        waited_s: it waited so long at the central scheduler; for its trace.
    """

    attempt_id: AttemptId
    spec: RequestSpec
    followers: tuple[Follower, ...] = ()
    has_reader: bool = False
    waited_s: float = 0.0


@dataclass(frozen=True, slots=True)
class RunLocal:
    """Compute both phases here. Mixed workers, and generation workers by conditional disaggregation.

    Attributes:
        waited_s: see `RunContext`.
    """

    attempt_id: AttemptId
    spec: RequestSpec
    followers: tuple[Follower, ...] = ()
    waited_s: float = 0.0


@dataclass(frozen=True, slots=True)
class OfferGeneration:
    """An invitation that holds nothing (C1a). Answered by Reserved, or Deferred, or Failed.

    `handoff` is None for generation-first dispatch; DeliverHandoff brings it later.

    Attributes:
        waited_s: since its context was done (or it was submitted, generation first), earlier offers included.
    """

    attempt_id: AttemptId
    spec: RequestSpec
    handoff: Handoff | None
    followers: tuple[Follower, ...] = ()
    waited_s: float = 0.0


@dataclass(frozen=True, slots=True)
class DeliverHandoff:
    """The finished context of a generation-first offer."""

    attempt_id: AttemptId
    handoff: Handoff


@dataclass(frozen=True, slots=True)
class CancelAttempt:
    """Release everything of this attempt. Unknown or ended attempts are ignored (C5 of the catalogue)."""

    attempt_id: AttemptId


@dataclass(frozen=True, slots=True)
class RenewLeases:
    """Extend these by their full duration.

    Attributes:
        lease_ids: of contexts that no generation worker has taken yet.
        reservations: attempts whose place was reserved before their context is computed.
    """

    lease_ids: tuple[LeaseId, ...]
    reservations: tuple[AttemptId, ...] = ()


WorkerCommand = RunContext | RunLocal | OfferGeneration | DeliverHandoff | DeliverPart | CancelAttempt | RenewLeases


@dataclass(frozen=True, slots=True)
class CommandBatch:
    """Commands of one central scheduler's life, in order.

    Attributes:
        term: the central scheduler's life; a worker refuses a lower one than it has seen.
        commands: in order.
        sequence: number of this batch among those of one term to one life of a worker, from 1.
    """

    term: Term
    commands: tuple[WorkerCommand, ...]
    sequence: int = 0


# -- worker -> central ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ContextDone:
    """The context half ended well. `handoff` is None when the first token ended the request.

    `carrier`: the attempt whose lease the ticket names, where this one only shared its context.
    """

    attempt_id: AttemptId
    handoff: Handoff | None
    carrier: AttemptId | None = None


@dataclass(frozen=True, slots=True)
class LeaseEnded:
    """The context side's pages are no longer held; `settled` tells a trusted read from an expiry."""

    attempt_id: AttemptId
    lease_id: LeaseId
    settled: bool


@dataclass(frozen=True, slots=True)
class Deferred:
    """The offer could not be taken now; the worker holds nothing of it. Offer it again later (C2)."""

    attempt_id: AttemptId
    reason: str
    needed: int
    available: int


@dataclass(frozen=True, slots=True)
class Reserved:
    """The offer became a reservation: pages are held and the transfer has begun."""

    attempt_id: AttemptId


@dataclass(frozen=True, slots=True)
class Activated:
    """The pages are verified and the request decodes here, as `followers` will; the lease is settled."""

    attempt_id: AttemptId
    followers: tuple[AttemptId, ...] = ()


@dataclass(frozen=True, slots=True)
class Finished:
    """The attempt ended with the request's last token."""

    attempt_id: AttemptId
    reason: FinishReason


@dataclass(frozen=True, slots=True)
class Failed:
    """The attempt ended by a fault and holds nothing. `retriable`: another attempt may succeed."""

    attempt_id: AttemptId
    kind: ErrorKind
    message: str
    retriable: bool


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The attempt was cancelled and holds nothing."""

    attempt_id: AttemptId


@dataclass(frozen=True, slots=True)
class RoomReported:
    """Something was released since the last Deferred: the oldest deferred offers may be tried again."""


AttemptReport = ContextDone | LeaseEnded | Deferred | Reserved | Activated | Finished | Failed | Cancelled
WorkerReport = AttemptReport | ContextPart | RoomReported | PrefixesChanged


@dataclass(frozen=True, slots=True)
class ReportBatch:
    """Reports of one iteration, in order.

    Attributes:
        sequence: number of the batch within the epoch, from 1; 0 where the way keeps the order.
    """

    worker: WorkerName
    epoch: Epoch
    reports: tuple[WorkerReport, ...]
    sequence: int = 0


@dataclass(frozen=True, slots=True)
class WorkerRegistration:
    """A worker's first word: who it is and what one request may need at most on it.

    `tokens_per_block` is 0 where it says nothing of its cache.
    """

    worker: WorkerName
    role: WorkerRole
    epoch: Epoch
    pid: int
    max_request_tokens: int
    tokens_per_block: int = 0


class WorkerState(StrEnum):
    """What a worker says of itself."""

    RUNNING = "running"
    CORRUPTED = "corrupted"
    """Its audit failed (M6)."""
    FAILED = "failed"
    """Its loop died of an error."""


@dataclass(frozen=True, slots=True)
class WorkerHeartbeat:
    """Sent by the agent thread every `heartbeat_s`, step or no step (C5).

    Attributes:
        busy_s: how long the present iteration has lasted; what came since its beginning is not in the account.
    """

    worker: WorkerName
    epoch: Epoch
    iteration: int
    longest_step_s: float
    snapshot: "WorkerSnapshot"
    busy_s: float = 0.0


@dataclass(frozen=True, slots=True)
class WorkerSnapshot:
    """A worker's own account of itself, for /cluster/state and the reconcile.

    Attributes:
        running: attempts that hold pages; a leased context may be among them or not.
        waiting: attempts that hold nothing yet.
        commands_seen: term and sequence of the last CommandBatch whose effects are in this account;
            None when the worker does not say.
        transports: for each worker that pages were read from: over what, and why.
    """

    worker: WorkerName
    role: WorkerRole
    epoch: Epoch
    pid: int
    state: WorkerState
    iteration: int
    running: tuple[AttemptId, ...]
    waiting: tuple[AttemptId, ...]
    stats: ManagerStats
    counters: Mapping[str, int] = field(default_factory=dict)
    commands_seen: tuple[Term, int] | None = None
    transports: Mapping[str, str] = field(default_factory=dict)


# -- worker -> door ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One generated token of one request.

    Attributes:
        uid: the request.
        attempt_id: the try that drew it.
        position: index among the request's generated tokens, from 0, earlier attempts included.
        token_id: the token.
        finish_reason: set on the last one.
        durations: on the first token of each worker, and on the last one.
        logprobs: of this token, when asked for.
        prompt_logprobs: of the prompt's tokens from the second on, with token 0, when asked for.
    """

    uid: RequestUid
    attempt_id: AttemptId
    position: int
    token_id: int
    finish_reason: FinishReason | None = None
    durations: PhaseDurations | None = None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """All token events of one step for one door."""

    worker: WorkerName
    epoch: Epoch
    door: DoorName
    events: tuple[TokenEvent, ...]


# -- central -> door -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DoorNotice:
    """A request that will get no further tokens from its present attempt.

    Attributes:
        uid: the request.
        kind: what happened.
        message: for the client; names the request, the value and the limit.
        retriable: the door may submit it again with what it has accepted (C9).
    """

    uid: RequestUid
    kind: ErrorKind
    message: str
    retriable: bool = False


@dataclass(frozen=True, slots=True)
class SubmitReply:
    """The central scheduler's answer to a submission: what it refused; everything else is queued.

    Submitting a uid that is queued or running already is no error and changes nothing (C6).
    """

    refused: tuple[DoorNotice, ...] = ()
