"""`CentralScheduler`: the cluster level of scheduling (C1 to C9). Events in, commands out.

Which worker computes which half of a request, what is offered to whom and when again, and where an
attempt goes after a death. Tokens never pass through it, and nothing in it is the only copy: a successor
with a higher term asks workers and doors again (C6).

Refuses to know Ray, sockets, clocks and chance: every event brings `now_s` (monotonic seconds of one
clock), and `take_commands` returns what to send. The same events give the same commands.

    shell                          CentralScheduler
      submit, cancel, reports, ...  ──►  books change, dispatch
      take_commands                 ──►  one batch per receiver, in order
      tick (a few times a second)   ──►  deadlines, silence, leases, offers to try again
      take_over, introduce, claim   ──►  a successor learns what runs, before it dispatches (C6)
"""

from collections.abc import Collection, Mapping, Sequence

from configs import CentralConfig, RouterConfig
from manager import Epoch, WorkerName
from scheduler.adoption import adopt, cancel_parts, hold_parts
from scheduler.central_admission import progress, refusal
from scheduler.central_books import CentralBooks
from scheduler.central_dispatch import Dispatcher
from scheduler.central_endings import Endings, Fault
from scheduler.central_reports import ReportHandler
from scheduler.central_routing import HAND_EVERYTHING_OVER, CentralRouting
from scheduler.central_state import JsonObject, cluster_state
from scheduler.introductions import HoldingKind, WorkerIntroduction
from scheduler.lease_renewal import LeaseRenewal
from scheduler.liveness import loss_reason, note_heartbeat
from scheduler.messages import (
    ErrorKind,
    ReportBatch,
    SubmitReply,
    WorkerHeartbeat,
    WorkerRegistration,
    WorkerRole,
    WorkerState,
)
from scheduler.outbox import AskDoor, AskWorker, CentralCommand, NotifyDoor, SendToWorker
from scheduler.reconcile import AccountReader, Divergence, DivergenceKind, reconcile
from scheduler.spec import DoorName, RequestSpec, RequestUid, Term
from scheduler.takeover import Takeover
from scheduler.tracked_request import Phase, TrackedRequest

__all__ = ["AskDoor", "AskWorker", "CentralCommand", "CentralScheduler", "NotifyDoor", "SendToWorker"]


class CentralScheduler:
    """One term of the central scheduler. Not thread-safe: one caller at a time."""

    def __init__(self, config: CentralConfig, term: Term, router: RouterConfig = HAND_EVERYTHING_OVER) -> None:
        """Begin with nothing known; `term` is above every term that any worker knows."""
        self._books = CentralBooks(config, router, term)
        self._endings = Endings(self._books)
        self._reports = ReportHandler(self._books, self._endings)
        self._dispatcher = Dispatcher(self._books, CentralRouting(self._books))
        self._takeover: Takeover | None = None
        self._held_reports: list[ReportBatch] = []
        self._highest_term_seen = Term(0)
        self._doors_heard_at_s: dict[DoorName, float] = {}
        self._lease_renewal = LeaseRenewal(self._books)

    # -- a new term --------------------------------------------------------------------------------

    def take_over(
        self,
        workers: Sequence[WorkerName],
        doors: Sequence[DoorName],
        now_s: float,
        gone: Collection[WorkerName] = (),
    ) -> None:
        """Begin the term by asking these what runs; nothing is dispatched before they have answered (C6).

        Called first of all, or never: without it the term dispatches at once. Workers that are `gone` are not waited
        for. Doors are asked by the names of their actors, and answer by the names of their lives.
        """
        config = self._books.config
        silence_s = config.missed_heartbeats * config.heartbeat_s
        self._takeover = Takeover(
            set(workers) - set(gone), len(doors), now_s, silence_s, max(config.takeover_timeout_s, silence_s)
        )
        self._books.is_taking_over = True
        for worker in workers:
            self._books.outbox.ask_worker(worker)
        for door in doors:
            self._books.outbox.ask_door(door)

    def introduce(self, introduction: WorkerIntroduction, now_s: float) -> bool:
        """A worker that was asked says who it is and what it holds.

        Returns:
            Whether the worker is live under this epoch now.
        """
        registration, worker = introduction.registration, introduction.registration.worker
        self._see_term(introduction.term)
        is_known = self._books.ledger.live(worker, registration.epoch) is not None
        if is_known or not self._register(registration, now_s):
            return is_known
        hold_parts(self._books, worker, introduction.parts, now_s)
        if self._takeover is not None:
            self._takeover.introduce(worker, introduction.parts)
            self._end_takeover(now_s)
        else:
            for part in introduction.parts:  # too late to be adopted, and the attempt may go on elsewhere
                request = self._books.attempts.get(part.attempt_id)
                if request is not None:
                    message = f"request {request.spec.uid}: {worker} was heard of too late"
                    self._endings.lose_attempt(request, Fault(ErrorKind.WORKER_LOST, message, is_retriable=True), now_s)
            cancel_parts(self._books, worker, introduction.parts, now_s)
        self._dispatcher.dispatch(now_s)
        return True

    def claim(self, door: DoorName, specs: Sequence[RequestSpec], now_s: float) -> None:
        """A door that was asked says which requests are its own. Open ones are left as they are."""
        self.door_heartbeat(door, now_s)
        for spec in specs:
            if spec.uid not in self._books.requests:
                self._books.admit(door, spec, now_s)
        if self._takeover is not None:
            self._takeover.claim(door)
            self._end_takeover(now_s)
        self._dispatcher.dispatch(now_s)

    @property
    def term(self) -> Term:
        """This life of the central scheduler."""
        return self._books.term

    @property
    def is_superseded(self) -> bool:
        """Whether some worker knows a higher term: this one must end, and start again above it."""
        return self._highest_term_seen > self._books.term

    def _see_term(self, term: Term) -> None:
        self._highest_term_seen = max(self._highest_term_seen, term)
        if self._takeover is not None and self._highest_term_seen >= self._books.term:
            self._books.raise_term(Term(self._highest_term_seen + 1))

    def _end_takeover(self, now_s: float) -> None:
        """Adopt what runs, once everybody was heard or the patience is over."""
        takeover, books = self._takeover, self._books
        if takeover is None or not takeover.is_complete(now_s):
            return
        self._takeover = None
        adopt(books, takeover.parts, now_s)
        books.is_taking_over = False
        books.took_over_at_s = now_s
        books.counters["takeovers"] += 1
        held, self._held_reports = self._held_reports, []
        for batch in held:
            self.reports(batch, now_s)
        self._dispatcher.dispatch(now_s)

    # -- workers -----------------------------------------------------------------------------------

    def register_worker(self, registration: WorkerRegistration, now_s: float) -> bool:
        """A worker's life begins, empty; a live earlier life of that name is lost by it.

        Epochs of one name must grow. Registering the live life again changes nothing; an older or a lost
        life is refused and counted: it was fenced, and must be restarted.

        Returns:
            Whether the worker is live under this epoch now.
        """
        is_live = self._register(registration, now_s)
        self._dispatcher.dispatch(now_s)
        return is_live

    def _register(self, registration: WorkerRegistration, now_s: float) -> bool:
        known = self._books.ledger.record(registration.worker)
        if known is not None and registration.epoch <= known.registration.epoch:
            is_same_life = known.is_live and registration.epoch == known.registration.epoch
            self._books.counters["refused_registrations"] += not is_same_life
            return is_same_life
        if known is not None and known.is_live:
            self._lose_worker(registration.worker, f"replaced by epoch {registration.epoch}", now_s)
        self._books.ledger.add_worker(registration, now_s)
        self._books.outbox.open(registration.worker, registration.epoch)
        if registration.role is WorkerRole.GENERATION:
            self._books.credit.open(registration.worker, now_s)
        if self._takeover is not None:
            self._takeover.introduce(registration.worker, ())
        self._books.replan_queued()
        return True

    def is_registered(self, worker: WorkerName, epoch: Epoch) -> bool:
        """Whether this life of the worker is live here; a new term asks the others to register."""
        return self._books.ledger.live(worker, epoch) is not None

    def worker_lost(self, worker: WorkerName, reason: str, now_s: float) -> None:
        """A worker is dead or fenced. Unknown and lost ones are ignored."""
        if self._books.ledger.is_live(worker):
            self._lose_worker(worker, reason, now_s)
            self._dispatcher.dispatch(now_s)

    def process_seen(self, worker: WorkerName, pid: int, now_s: float) -> None:
        """The supervisor sees this life's process run: a missing heartbeat alone does not mean that it is dead."""
        record = self._books.ledger.record(worker)
        if record is not None and record.registration.pid == pid:
            record.vouched_at_s = now_s

    def process_lost(self, worker: WorkerName, pid: int, reason: str, now_s: float) -> None:
        """The process of one life of a worker is dead or stands still; later lives are not meant."""
        record = self._books.ledger.record(worker)
        if record is not None and record.registration.pid == pid:
            self.worker_lost(worker, reason, now_s)

    def lost_workers(self) -> Mapping[WorkerName, Epoch]:
        """Lives that are fenced and not replaced yet, for the supervisor to end and restart."""
        return {record.worker: record.registration.epoch for record in self._books.ledger if not record.is_live}

    def heartbeat(self, heartbeat: WorkerHeartbeat, now_s: float) -> Sequence[Divergence]:
        """A worker lives; its account is held against the ledger (C6).

        Returns:
            Differences that persisted: counted and repaired already, for the caller to log.
        """
        record = self._books.ledger.live(heartbeat.worker, heartbeat.epoch)
        if record is None:
            self._on_strange_heartbeat(heartbeat)
            return ()
        if heartbeat.snapshot.state is not WorkerState.RUNNING:
            self._books.counters["audit_violations"] += heartbeat.snapshot.state is WorkerState.CORRUPTED
            self.worker_lost(heartbeat.worker, f"it reported itself {heartbeat.snapshot.state}", now_s)
            return ()
        note_heartbeat(record, heartbeat, now_s)
        if self._takeover is not None:
            return ()  # the ledger is not complete yet
        reader = AccountReader(self._books.term, grace_s=self._books.config.door_deadline_s)
        divergences = reconcile(self._books.ledger, record, heartbeat, reader, now_s)
        for divergence in divergences:
            self._repair(divergence, now_s)
        self._dispatcher.dispatch(now_s)
        return divergences

    def reports(self, batch: ReportBatch, now_s: float) -> None:
        """Reports of one iteration; those of a life that is not live are counted and ignored."""
        if self._books.ledger.live(batch.worker, batch.epoch) is None:
            self._books.counters["stale_reports"] += len(batch.reports)
            return
        if self._takeover is not None:
            self._held_reports.append(batch)  # what they are about is not known yet
            return
        for report in batch.reports:
            self._reports.handle(batch.worker, report, now_s)
        self._dispatcher.dispatch(now_s)

    # -- doors -------------------------------------------------------------------------------------

    def submit(self, door: DoorName, specs: Sequence[RequestSpec], now_s: float) -> SubmitReply:
        """Queue requests. One that is open already is left as it is (idempotent by uid, C6).

        Returns:
            The refused ones, each with its reason; nothing is kept of them.
        """
        refused = []
        for spec in specs:
            if spec.uid in self._books.requests:
                continue
            notice = refusal(self._books, spec, now_s)
            if notice is None:
                self._books.admit(door, spec, now_s)
            else:
                self._books.counters["refused"] += 1
                refused.append(notice)
        self._dispatcher.dispatch(now_s)
        return SubmitReply(tuple(refused))

    def cancel(self, door: DoorName, uids: Sequence[RequestUid], now_s: float) -> None:
        """Give requests of this door up everywhere. Ended and unknown ones are ignored."""
        for uid in reversed(uids):  # those that follow another choice go before it
            request = self._books.requests.get(uid)
            if request is not None and request.door == door:
                self._endings.cancel(request, now_s)
        self._dispatcher.dispatch(now_s)

    def door_heartbeat(self, door: DoorName, now_s: float) -> None:
        """A door lives. One that has said so and falls silent for `door_deadline_s` is lost."""
        if self._takeover is not None:
            self._takeover.hear_door(door)
        self._doors_heard_at_s[door] = now_s

    def knows_door(self, door: DoorName) -> bool:
        """Whether this door has been heard; another one must claim its open requests."""
        return door in self._doors_heard_at_s

    def door_lost(self, door: DoorName, now_s: float) -> None:
        """A door is gone: its requests are cancelled everywhere. It may be told twice, and may come back."""
        was_heard = self._doors_heard_at_s.pop(door, None) is not None
        orphans = [request for request in self._books.requests.values() if request.door == door]
        for request in orphans:
            self._endings.cancel(request, now_s)
        self._books.outbox.drop_door(door)
        self._books.counters["lost_doors"] += was_heard or bool(orphans)
        self._dispatcher.dispatch(now_s)

    # -- time --------------------------------------------------------------------------------------

    def tick(self, now_s: float) -> None:
        """What time alone brings about. Called a few times per heartbeat, work or no work (I5)."""
        self._end_takeover(now_s)
        for record in self._books.ledger.workers(*WorkerRole):
            reason = loss_reason(record, self._books.config, now_s)
            if reason is not None:
                self._lose_worker(record.worker, reason, now_s)
        for door, heard_at_s in list(self._doors_heard_at_s.items()):
            if now_s - heard_at_s > self._books.config.door_deadline_s:
                self.door_lost(door, now_s)
        self._expire_requests(now_s)
        self._lease_renewal.renew_when_due(now_s)
        for record in self._books.ledger.workers(WorkerRole.GENERATION):
            is_due = self._books.credit.is_retry_due(record.worker, now_s)
            if is_due and not record.num_held(HoldingKind.OFFER):
                self._books.credit.retry(record.worker, now_s)
        self._dispatcher.dispatch(now_s)

    def excuse_silence(self, stalled_s: float) -> None:
        """This process stood still for so long: nobody was silent or frozen meanwhile."""
        for record in self._books.ledger:
            record.heard_at_s += stalled_s
            record.progress_at_s += stalled_s
        for door in self._doors_heard_at_s:
            self._doors_heard_at_s[door] += stalled_s
        if self._takeover is not None:
            self._takeover.began_s += stalled_s

    # -- what comes out ----------------------------------------------------------------------------

    def take_commands(self) -> Sequence[CentralCommand]:
        """Everything to send since the last call: one batch per receiver, in order."""
        return self._books.outbox.take()

    def state(self, now_s: float) -> JsonObject:
        """For GET /cluster/state: workers, central, counters."""
        return cluster_state(self._books, now_s)

    def health(self) -> tuple[bool, str]:
        """Whether work can make progress, and the reason when not."""
        return progress(self._books)

    def audit(self) -> None:
        """Recompute load counters and compare. Raises LogicError where one drifted."""
        self._books.ledger.audit()

    # -- parts -------------------------------------------------------------------------------------

    def _lose_worker(self, worker: WorkerName, reason: str, now_s: float) -> None:
        books = self._books
        books.ledger.lose_worker(worker, reason, now_s)
        books.outbox.close(worker)
        books.credit.close(worker)
        books.prefixes.forget(worker)
        books.counters["lost_workers"] += 1
        if self._takeover is not None:
            self._takeover.lose_worker(worker)
        for request in list(books.attempts.values()):
            if worker == request.generation_worker or (worker == request.context_worker and _needs_context(request)):
                message = f"request {request.spec.uid}: worker {worker} was lost: {reason}"
                request.failed_on.add(worker)
                fault = Fault(ErrorKind.WORKER_LOST, message, is_retriable=True)
                self._endings.lose_attempt(request, fault, now_s)

    def _on_strange_heartbeat(self, heartbeat: WorkerHeartbeat) -> None:
        """Of a life that is not live here: unknown, it is asked who it is; fenced, it is ignored."""
        self._books.counters["stale_heartbeats"] += 1
        known = self._books.ledger.record(heartbeat.worker)
        if known is None or known.registration.epoch < heartbeat.epoch:
            self._books.outbox.ask_worker(heartbeat.worker)
            if self._takeover is not None:
                self._takeover.hear_worker(heartbeat.worker)

    def _repair(self, divergence: Divergence, now_s: float) -> None:
        books, worker, attempt_id = self._books, divergence.worker, divergence.attempt_id
        books.counters["divergences"] += 1
        if divergence.kind is DivergenceKind.MISSING:
            books.ledger.release(worker, attempt_id)
        # Also where it is missing: should the worker have it after all, it must not run on unclaimed.
        books.cancel(worker, attempt_id, now_s)
        request = books.attempts.get(attempt_id)
        if request is not None and divergence.kind is DivergenceKind.MISSING:
            fault = Fault(ErrorKind.INTERNAL, f"request {request.spec.uid}: {divergence.message}", is_retriable=True)
            self._endings.lose_attempt(request, fault, now_s)

    def _expire_requests(self, now_s: float) -> None:
        deadline_s = self._books.config.request_deadline_s
        for request in list(self._books.requests.values()):
            open_s = now_s - request.submitted_at_s
            if open_s < deadline_s:
                return  # the others were submitted later
            message = f"request {request.spec.uid} was open for {open_s:.1f} s, the deadline is {deadline_s} s"
            self._books.counters["expired_requests"] += 1
            self._endings.fail(request, Fault(ErrorKind.DEADLINE, message, is_retriable=False), now_s)


def _needs_context(request: TrackedRequest) -> bool:
    """Whether losing the context worker loses the attempt: until its pages are verified elsewhere."""
    return request.phase is not Phase.GENERATION
