"""Naive workers for tests of the central scheduler: they hold names of attempts, never pages.

A test decides what happens to each part; the model answers as a worker must, and forgets what has ended.
"""

from dataclasses import dataclass, field
from itertools import count
from typing import assert_never

from manager import Epoch, LeaseId, ManagerStats, PageCounts, Tier, WorkerName
from scheduler.introductions import AttemptPart, HoldingKind, WorkerIntroduction
from scheduler.messages import (
    Activated,
    CancelAttempt,
    Cancelled,
    CommandBatch,
    ContextDone,
    Deferred,
    DeliverHandoff,
    ErrorKind,
    Failed,
    Finished,
    Handoff,
    LeaseEnded,
    OfferGeneration,
    RenewLeases,
    ReportBatch,
    Reserved,
    RoomReported,
    RunContext,
    RunLocal,
    WorkerCommand,
    WorkerHeartbeat,
    WorkerRegistration,
    WorkerReport,
    WorkerRole,
    WorkerSnapshot,
    WorkerState,
)
from scheduler.spec import AttemptId, FinishReason, RequestSpec, RequestUid, Term
from scheduler.tickets import ContextPart, DeliverPart

_NO_TERM = Term(0)
KINDS = {
    "context": HoldingKind.CONTEXT,
    "leased": HoldingKind.LEASE,
    "offered": HoldingKind.OFFER,
    "reserved": HoldingKind.TRANSFER,
    "active": HoldingKind.GENERATION,
    "local": HoldingKind.LOCAL,
}
STATS = ManagerStats({Tier.DEVICE: PageCounts(total=8, free=8)}, 4, 4, 0, 0, suspensions=2, rollbacks=3)


@dataclass(frozen=True, slots=True)
class FakeTicket:
    """A `scheduler.messages.Ticket` of known bytes."""

    owner: WorkerName
    epoch: Epoch
    lease_id: LeaseId
    num_tokens: int
    total_bytes: int = 1000


@dataclass(slots=True)
class ModelWorker:
    """One life of one worker.

    `parts` maps an attempt to what is held of it: context, leased, offered, reserved, active, local.
    """

    name: WorkerName
    role: WorkerRole
    epoch: Epoch
    max_request_tokens: int = 100
    tokens_per_block: int = 4
    parts: dict[AttemptId, str] = field(default_factory=dict)
    specs: dict[AttemptId, RequestSpec] = field(default_factory=dict)
    handoffs: dict[AttemptId, Handoff] = field(default_factory=dict)
    tickets: dict[AttemptId, FakeTicket] = field(default_factory=dict)
    inbox: list[CommandBatch] = field(default_factory=list)
    received: list[WorkerCommand] = field(default_factory=list)
    outgoing: list[ReportBatch | WorkerHeartbeat] = field(default_factory=list)
    reports: list[WorkerReport] = field(default_factory=list)
    commands_seen: tuple[Term, int] | None = None
    busy_s: float = 0.0
    term: Term = _NO_TERM
    refused_terms: int = 0
    iteration: int = 0
    room_wanted: bool = False
    lease_ids: "count[int]" = field(default_factory=lambda: count(1))

    def registration(self) -> WorkerRegistration:
        """Its first word."""
        return WorkerRegistration(self.name, self.role, self.epoch, 100, self.max_request_tokens, self.tokens_per_block)

    def introduce(self, term: Term) -> WorkerIntroduction:
        """Its answer to a new term: everything it holds, reports of it included."""
        seen, self.term = self.term, max(self.term, term)
        parts = tuple(self._part(attempt_id, part) for attempt_id, part in self.parts.items())
        return WorkerIntroduction(self.registration(), seen, 0, parts)

    def _part(self, attempt_id: AttemptId, part: str) -> AttemptPart:
        spec = self.specs[attempt_id]
        ticket = self.tickets.get(attempt_id)
        handoff = Handoff(ticket, first_token_id=7) if ticket is not None else self.handoffs.get(attempt_id)
        return AttemptPart(attempt_id, spec.uid, KINDS[part], len(spec.prompt_token_ids), handoff)

    # -- from the central scheduler ----------------------------------------------------------------

    def read_commands(self) -> None:
        """Handle everything in the inbox."""
        for batch in self.inbox:
            if batch.term < self.term:
                self.refused_terms += 1
                continue
            self.term = batch.term
            self.commands_seen = (batch.term, batch.sequence)
            for command in batch.commands:
                self.received.append(command)
                self._handle(command)
        self.inbox.clear()

    def _handle(self, command: WorkerCommand) -> None:
        match command:
            case RunContext():
                self._hold(command, "context")
            case RunLocal():
                self._hold(command, "local")
            case OfferGeneration():
                self._hold(command, "offered")
                if command.handoff is not None:
                    self.handoffs[command.attempt_id] = command.handoff
            case DeliverHandoff():
                if command.attempt_id in self.parts:
                    self.handoffs[command.attempt_id] = command.handoff
            case CancelAttempt():
                self._cancel(command.attempt_id)
            case RenewLeases() | DeliverPart():
                pass
            case _:
                assert_never(command)

    def _hold(self, command: RunContext | RunLocal | OfferGeneration, part: str) -> None:
        assert command.attempt_id not in self.parts, f"{self.name} was given {command.attempt_id} twice"
        self.parts[command.attempt_id] = part
        self.specs[command.attempt_id] = command.spec

    def _cancel(self, attempt_id: AttemptId) -> None:
        part = self.parts.pop(attempt_id, None)
        if part is None:
            return
        self.reports.append(Cancelled(attempt_id))
        if part == "leased":
            self.reports.append(LeaseEnded(attempt_id, self.tickets.pop(attempt_id).lease_id, settled=False))
        self._released()

    # -- what a test lets happen ---------------------------------------------------------------------

    def finish_context(self, attempt_id: AttemptId) -> None:
        """The prompt is computed: its pages are leased."""
        self._expect(attempt_id, "context")
        spec = self.specs[attempt_id]
        num_tokens = len(spec.prompt_token_ids) + len(spec.accepted_token_ids)
        ticket = FakeTicket(self.name, self.epoch, LeaseId(next(self.lease_ids)), num_tokens)
        self.parts[attempt_id] = "leased"
        self.tickets[attempt_id] = ticket
        self.reports.append(ContextDone(attempt_id, Handoff(ticket, first_token_id=7)))

    def offer_part(self, attempt_id: AttemptId) -> None:
        """Some of the prompt is computed."""
        self._expect(attempt_id, "context")
        ticket = FakeTicket(self.name, self.epoch, LeaseId(next(self.lease_ids)), 1)
        self.reports.append(ContextPart(attempt_id, ticket))

    def finish_by_first_token(self, attempt_id: AttemptId) -> None:
        """The first token ends the request."""
        self._expect(attempt_id, "context")
        self.parts.pop(attempt_id)
        self.reports.append(ContextDone(attempt_id, None))

    def end_lease(self, attempt_id: AttemptId, *, settled: bool) -> None:
        """A reader has settled, or nobody came."""
        self._expect(attempt_id, "leased")
        self.parts.pop(attempt_id)
        self.reports.append(LeaseEnded(attempt_id, self.tickets.pop(attempt_id).lease_id, settled=settled))

    def defer(self, attempt_id: AttemptId) -> None:
        """Not now; it holds nothing of it."""
        self._expect(attempt_id, "offered")
        self.parts.pop(attempt_id)
        self.handoffs.pop(attempt_id, None)
        self.room_wanted = True
        self.reports.append(Deferred(attempt_id, "device_pages", needed=4, available=1))

    def reserve(self, attempt_id: AttemptId) -> None:
        """Take the offer."""
        self._expect(attempt_id, "offered")
        self.parts[attempt_id] = "reserved"
        self.reports.append(Reserved(attempt_id))

    def activate(self, attempt_id: AttemptId) -> FakeTicket:
        """The pages are read; returns the ticket, whose owner learns that it is settled."""
        self._expect(attempt_id, "reserved")
        self.parts[attempt_id] = "active"
        self.reports.append(Activated(attempt_id))
        ticket = self.handoffs.pop(attempt_id).ticket
        assert isinstance(ticket, FakeTicket)
        return ticket

    def finish(self, attempt_id: AttemptId) -> None:
        """The last token."""
        assert self.parts.pop(attempt_id) in {"active", "local"}
        self.reports.append(Finished(attempt_id, FinishReason.LENGTH))
        self._released()

    def fail(self, attempt_id: AttemptId, *, retriable: bool, kind: ErrorKind = ErrorKind.ENGINE) -> None:
        """A fault in any part but a lease."""
        assert self.parts.pop(attempt_id) != "leased"
        self.reports.append(Failed(attempt_id, kind, f"{attempt_id} failed", retriable=retriable))
        self._released()

    def flush(self) -> None:
        """End an iteration: its reports are on their way, in order with heartbeats."""
        self.iteration += 1
        if self.reports:
            self.outgoing.append(ReportBatch(self.name, self.epoch, tuple(self.reports)))
            self.reports = []

    def beat(self) -> None:
        """A heartbeat is on its way."""
        running = tuple(attempt_id for attempt_id, part in self.parts.items() if part != "offered")
        waiting = tuple(attempt_id for attempt_id, part in self.parts.items() if part == "offered")
        snapshot = WorkerSnapshot(
            worker=self.name,
            role=self.role,
            epoch=self.epoch,
            pid=100,
            state=WorkerState.RUNNING,
            iteration=self.iteration,
            running=running,
            waiting=waiting,
            stats=STATS,
            counters={"refused_terms": 1, "bytes_received": 10},
            commands_seen=self.commands_seen,
        )
        self.outgoing.append(WorkerHeartbeat(self.name, self.epoch, self.iteration, 0.1, snapshot, self.busy_s))

    def _released(self) -> None:
        if self.room_wanted:
            self.room_wanted = False
            self.reports.append(RoomReported())

    def _expect(self, attempt_id: AttemptId, part: str) -> None:
        assert self.parts.get(attempt_id) == part, f"{self.name}: {attempt_id} is {self.parts.get(attempt_id)}"

    def attempt_of(self, uid: RequestUid) -> AttemptId:
        """The attempt held here for a request."""
        return next(attempt_id for attempt_id in self.parts if self.specs[attempt_id].uid == uid)
