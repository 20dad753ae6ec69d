"""`TrackedRequest`: one open request as the central scheduler sees it, and the phases of its attempt.

    another's choice  ... CONTEXT -> FOLLOWING -> GENERATION, with the ticket and the transfer of its leader
    context first     WAITING_CONTEXT -> CONTEXT -> WAITING_OFFER <-> OFFERED -> TRANSFER -> GENERATION
    generation first  WAITING_OFFER <-> OFFERED -> WAITING_CONTEXT -> CONTEXT -> TRANSFER -> GENERATION
    mixed worker      WAITING_CONTEXT -> LOCAL
    computed where it decodes (conditional disaggregation)   WAITING_CONTEXT or WAITING_OFFER -> LOCAL

`RequestState` (QUEUED, RUNNING, terminal) moves by `scheduler.states` only; the phase refines it while
the request is open, and moves by the table below only. Knows nothing of queues, ledgers or messages
that wait.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from manager import BlockHash, ReuseScope, WorkerName, block_hashes
from scheduler.arrival_queue import ArrivalKey
from scheduler.errors import IllegalTransition
from scheduler.messages import Handoff
from scheduler.spec import AttemptId, DoorName, RequestSpec
from scheduler.states import RequestEvent, RequestState, advance_request


class Phase(StrEnum):
    """Where an open request is in the cluster."""

    WAITING_CONTEXT = "waiting_context"
    CONTEXT = "context"
    WAITING_OFFER = "waiting_offer"
    OFFERED = "offered"
    FOLLOWING = "following"
    TRANSFER = "transfer"
    GENERATION = "generation"
    LOCAL = "local"


_P = Phase
PHASE_TRANSITIONS: Mapping[Phase, frozenset[Phase]] = {
    # Queued requests change sides when the first worker of a role joins.
    _P.WAITING_CONTEXT: frozenset({_P.CONTEXT, _P.LOCAL, _P.WAITING_OFFER}),
    _P.CONTEXT: frozenset({_P.WAITING_OFFER, _P.FOLLOWING, _P.TRANSFER}),
    _P.FOLLOWING: frozenset({_P.GENERATION}),
    _P.WAITING_OFFER: frozenset({_P.OFFERED, _P.WAITING_CONTEXT, _P.LOCAL}),
    # Back to WAITING_OFFER when deferred; to WAITING_CONTEXT when reserved before the context exists.
    _P.OFFERED: frozenset({_P.WAITING_OFFER, _P.WAITING_CONTEXT, _P.TRANSFER}),
    _P.TRANSFER: frozenset({_P.GENERATION}),
    _P.GENERATION: frozenset(),
    _P.LOCAL: frozenset(),
}


@dataclass(slots=True, eq=False)
class TrackedRequest:
    """One submission of one request, from admission to its terminal event.

    Attributes:
        spec: what the door asked for.
        door: who asked.
        key: its place in every queue, by arrival and priority; kept over retries and deferrals.
        submitted_at_s: the caller's clock.
        waiting_since_s: when its present wait began; deferrals do not end one.
        phase: where it is; changed by `enter`, `restart` and `adopt` only.
        state: QUEUED, RUNNING or terminal; changed by `on_event` only.
        attempt_id: the running attempt.
        num_attempts: attempts begun so far.
        context_worker: computes the prompt, then owns the lease.
        generation_worker: was offered the attempt, holds a reservation or decodes; in LOCAL, does both.
        handoff: what the context half left; None before it ended.
        is_lease_open: the context worker holds pages that no generation worker has verified.
        num_deferrals: offers that came back.
        leader: in FOLLOWING, the choice of the same prompt with whose ticket it travels.
        followers: those of which it is the leader.
        failed_on: workers that lost an attempt of it; avoided where there is a choice.
    """

    spec: RequestSpec
    door: DoorName
    key: ArrivalKey
    submitted_at_s: float
    phase: Phase
    state: RequestState = RequestState.QUEUED
    attempt_id: AttemptId | None = None
    num_attempts: int = 0
    context_worker: WorkerName | None = None
    generation_worker: WorkerName | None = None
    handoff: Handoff | None = None
    is_lease_open: bool = False
    num_deferrals: int = 0
    leader: "TrackedRequest | None" = None
    followers: "list[TrackedRequest]" = field(default_factory=list)
    failed_on: set[WorkerName] = field(default_factory=set)
    waiting_since_s: float = field(init=False)
    _block_hashes: dict[int, Sequence[BlockHash]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """It waits from the beginning."""
        self.waiting_since_s = self.submitted_at_s

    @property
    def context_tokens(self) -> int:
        """Positions that the context half computes."""
        return len(self.spec.prompt_token_ids) + len(self.spec.accepted_token_ids)

    @property
    def total_tokens(self) -> int:
        """Positions at most by the last token."""
        return total_tokens(self.spec)

    def block_hashes(self, tokens_per_block: int) -> Sequence[BlockHash]:
        """Hashes of the full blocks of what the context half computes; worked out once."""
        hashes = self._block_hashes.get(tokens_per_block)
        if hashes is None:
            spec = self.spec
            token_ids = (*spec.prompt_token_ids, *spec.accepted_token_ids)
            hashes = block_hashes(token_ids, tokens_per_block, ReuseScope(spec.reuse_scope))
            self._block_hashes[tokens_per_block] = hashes
        return hashes

    @property
    def has_emitted(self) -> bool:
        """Whether a token of this attempt may be at the door, so that only the door can go on (C9)."""
        return self.handoff is not None or self.phase in (Phase.LOCAL, Phase.GENERATION)

    def enter(self, phase: Phase) -> None:
        """Move by the table. Raises IllegalTransition and changes nothing where it has no such move."""
        if phase not in PHASE_TRANSITIONS[self.phase]:
            msg = f"request {self.spec.uid} in phase {self.phase} cannot enter {phase}"
            raise IllegalTransition(msg)
        self.phase = phase

    def on_event(self, event: RequestEvent) -> None:
        """Move the state by the table of `scheduler.states`."""
        self.state = advance_request(self.state, event)

    def adopt(self, attempt_id: AttemptId, phase: Phase) -> None:
        """Queued, and found running: an attempt of an earlier term is its own."""
        self.on_event(RequestEvent.DISPATCHED)
        self.phase = phase
        self.attempt_id = attempt_id
        self.num_attempts += 1

    def restart(self, phase: Phase) -> None:
        """The attempt was lost: forget it and wait again from `phase`."""
        self.on_event(RequestEvent.ATTEMPT_LOST)
        self.phase = phase
        self.attempt_id = None
        self.context_worker = None
        self.generation_worker = None
        self.handoff = None
        self.is_lease_open = False


def total_tokens(spec: RequestSpec) -> int:
    """Positions that a request needs at most: prompt and generated tokens, earlier attempts included."""
    return len(spec.prompt_token_ids) + spec.stop.max_tokens
