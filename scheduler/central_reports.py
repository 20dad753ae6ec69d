"""What a worker's report means for the attempt it names.

A report counts only when it comes from a worker that holds that part of the attempt, in the phase in
which the part exists. Anything else is late: it may still free what the ledger held against the worker
(an answered cancel), and changes no request.
"""

from typing import assert_never

from manager import WorkerName
from scheduler.central_books import CentralBooks
from scheduler.central_endings import Endings, Fault
from scheduler.choice_groups import on_context_shared, on_group_activated
from scheduler.introductions import HoldingKind
from scheduler.ledger import Holding
from scheduler.messages import (
    Activated,
    AttemptReport,
    Cancelled,
    ContextDone,
    Deferred,
    DeliverHandoff,
    ErrorKind,
    Failed,
    Finished,
    Handoff,
    LeaseEnded,
    Reserved,
    RoomReported,
    WorkerReport,
)
from scheduler.prefix_changes import PrefixesChanged
from scheduler.spec import AttemptId
from scheduler.tickets import ContextPart, DeliverPart
from scheduler.tracked_request import Phase, TrackedRequest

_ONLY_OFFERED = frozenset({Phase.OFFERED, Phase.WAITING_OFFER})


class ReportHandler:
    """Applies reports to the books."""

    def __init__(self, books: CentralBooks, endings: Endings) -> None:
        """End requests through `endings`."""
        self._books = books
        self._endings = endings

    def handle(self, worker: WorkerName, report: WorkerReport, now_s: float) -> None:
        """Apply one report of a live worker's present life."""
        if isinstance(report, RoomReported):
            self._books.credit.on_room(worker)
            return
        if isinstance(report, PrefixesChanged):
            self._books.prefixes.apply(worker, report)
            return
        request = self._books.attempts.get(report.attempt_id)
        if isinstance(report, ContextPart):
            if request is not None and worker == request.context_worker:
                self._pass_on(request, report)
            return
        if request is None or not self._apply(request, worker, report, now_s):
            self._settle_late(worker, report, now_s)

    def _apply(self, request: TrackedRequest, worker: WorkerName, report: AttemptReport, now_s: float) -> bool:
        """Returns whether the report was about a part that exists."""
        is_context = worker == request.context_worker
        is_generation = worker == request.generation_worker
        match report:
            case ContextDone(handoff=handoff, carrier=carrier):
                applied = is_context and self._on_context_done(request, handoff, carrier, now_s)
            case LeaseEnded(settled=settled):
                applied = is_context and self._on_lease_ended(request, now_s, settled=settled)
            case Deferred():
                applied = is_generation and self._on_deferred(request, now_s)
            case Reserved():
                applied = is_generation and self._on_reserved(request)
            case Activated(followers=followers):
                applied = is_generation and self._on_activated(request, followers, now_s)
            case Finished():
                applied = is_generation and self._on_finished(request, now_s)
            case Failed(kind=kind, message=message, retriable=retriable):
                applied = self._on_failed(request, worker, Fault(kind, message, retriable), now_s)
            case Cancelled():
                message = f"request {request.spec.uid}: worker {worker} dropped its attempt unasked"
                applied = self._on_failed(request, worker, Fault(ErrorKind.INTERNAL, message, is_retriable=True), now_s)
            case _:
                assert_never(report)
        return applied

    def _pass_on(self, request: TrackedRequest, part: ContextPart) -> None:
        """To the reader that waits; a part that comes late is in the final ticket."""
        if request.phase is Phase.CONTEXT and request.generation_worker is not None:
            self._books.outbox.send(request.generation_worker, DeliverPart(part.attempt_id, part.ticket))

    # -- the context half --------------------------------------------------------------------------

    def _on_context_done(
        self, request: TrackedRequest, handoff: Handoff | None, carrier: AttemptId | None, now_s: float
    ) -> bool:
        worker, attempt_id = request.context_worker, request.attempt_id
        if request.phase is not Phase.CONTEXT or worker is None or attempt_id is None:
            return False
        if handoff is not None and carrier is not None:
            on_context_shared(self._books, self._endings, request, handoff, carrier, now_s)
            return True
        if handoff is None:
            self._books.ledger.release(worker, attempt_id)
            self._endings.complete(request, now_s)
            return True
        self._books.ledger.change(worker, attempt_id, HoldingKind.LEASE)
        request.handoff = handoff
        request.is_lease_open = True
        if request.generation_worker is None:
            request.enter(Phase.WAITING_OFFER)
            request.waiting_since_s = now_s
            self._books.enqueue(request)
        else:
            request.enter(Phase.TRANSFER)
            self._books.outbox.send(request.generation_worker, DeliverHandoff(attempt_id, handoff))
        return True

    def _on_lease_ended(self, request: TrackedRequest, now_s: float, *, settled: bool) -> bool:
        if request.context_worker is None or request.attempt_id is None or not request.has_emitted:
            return False
        self._books.ledger.release(request.context_worker, request.attempt_id)
        request.is_lease_open = False
        # During a transfer the reader's own settle tells; before it, nobody else would notice.
        if not settled and request.phase in _ONLY_OFFERED:
            message = f"request {request.spec.uid}: its lease on {request.context_worker} expired before it was read"
            self._endings.lose_attempt(request, Fault(ErrorKind.TRANSFER, message, is_retriable=True), now_s)
        return True

    # -- the generation half -----------------------------------------------------------------------

    def _on_deferred(self, request: TrackedRequest, now_s: float) -> bool:
        worker, attempt_id = request.generation_worker, request.attempt_id
        if request.phase is not Phase.OFFERED or worker is None or attempt_id is None:
            return False
        self._books.ledger.release(worker, attempt_id)
        self._books.credit.on_deferred(worker, now_s)
        self._books.counters["deferrals"] += 1
        request.num_deferrals += 1
        request.generation_worker = None
        request.enter(Phase.WAITING_OFFER)
        self._books.enqueue(request)
        return True

    def _on_reserved(self, request: TrackedRequest) -> bool:
        worker, attempt_id = request.generation_worker, request.attempt_id
        if request.phase is not Phase.OFFERED or worker is None or attempt_id is None:
            return False
        self._books.ledger.change(worker, attempt_id, HoldingKind.TRANSFER)
        self._books.credit.on_reserved(worker)
        if request.handoff is not None:
            request.enter(Phase.TRANSFER)
        else:
            request.enter(Phase.WAITING_CONTEXT)
            self._books.enqueue(request)
        return True

    def _on_activated(self, request: TrackedRequest, followers: tuple[AttemptId, ...], now_s: float) -> bool:
        worker, attempt_id, handoff = request.generation_worker, request.attempt_id, request.handoff
        if request.phase is not Phase.TRANSFER or worker is None or attempt_id is None or handoff is None:
            return False
        self._books.ledger.change(worker, attempt_id, HoldingKind.GENERATION)
        request.enter(Phase.GENERATION)
        request.is_lease_open = False
        self._books.counters["transfers"] += 1
        self._books.counters["ticket_bytes"] += handoff.ticket.total_bytes
        on_group_activated(self._books, worker, request, followers, now_s)
        return True

    def _on_finished(self, request: TrackedRequest, now_s: float) -> bool:
        if request.generation_worker is None or request.attempt_id is None or not request.has_emitted:
            return False
        self._books.ledger.release(request.generation_worker, request.attempt_id)
        self._endings.complete(request, now_s)
        return True

    # -- either half -------------------------------------------------------------------------------

    def _on_failed(self, request: TrackedRequest, worker: WorkerName, fault: Fault, now_s: float) -> bool:
        if request.attempt_id is None or not self._holds_part(request, worker):
            return False
        holding = self._books.ledger.release(worker, request.attempt_id)
        self._return_credit(worker, holding)
        if worker == request.context_worker:
            request.is_lease_open = False
        request.failed_on.add(worker)
        self._endings.lose_attempt(request, fault, now_s)
        return True

    @staticmethod
    def _holds_part(request: TrackedRequest, worker: WorkerName) -> bool:
        if worker == request.generation_worker:
            return True
        # Once the pages were verified elsewhere, the context side has no say any more.
        return worker == request.context_worker and request.phase is not Phase.GENERATION

    # -- reports about what is over ----------------------------------------------------------------

    def _settle_late(self, worker: WorkerName, report: AttemptReport, now_s: float) -> None:
        if isinstance(report, Activated):
            on_group_activated(self._books, worker, None, report.followers, now_s)
        holding = self._books.ledger.holding(worker, report.attempt_id)
        if holding is None:
            self._on_stranger(worker, report, now_s)
        elif not holding.is_ending and report.attempt_id in self._books.attempts:
            self._books.counters["late_reports"] += 1  # repeated, or out of turn: the part lives on
        elif isinstance(report, ContextDone) and report.handoff is not None:
            # The cancel crossed it and will end the lease.
            self._books.ledger.change(worker, report.attempt_id, HoldingKind.LEASE)
        elif self._ends_holding(report, holding):
            self._return_credit(worker, self._books.ledger.release(worker, report.attempt_id))

    @staticmethod
    def _ends_holding(report: AttemptReport, holding: Holding) -> bool:
        # A cancelled lease may be listed until it has ended, so that alone ends its holding.
        if holding.kind is HoldingKind.LEASE:
            return isinstance(report, LeaseEnded)
        return not isinstance(report, Reserved | Activated)

    def _on_stranger(self, worker: WorkerName, report: AttemptReport, now_s: float) -> None:
        if isinstance(report, Cancelled | LeaseEnded):
            return  # these follow an end that was told before
        self._books.counters["late_reports"] += 1
        if isinstance(report, ContextDone | Reserved | Activated):
            self._books.cancel(worker, report.attempt_id, now_s)  # it holds pages for nobody

    def _return_credit(self, worker: WorkerName, holding: Holding | None) -> None:
        if holding is not None and holding.kind is HoldingKind.OFFER:
            self._books.credit.on_returned(worker)
