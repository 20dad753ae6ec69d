"""The loop of a worker: commands and outcomes in, one step, events out.

One iteration:

    commands (central scheduler) ─┐
    outcomes (agent thread) ──────┤─► schedule ─► engine.step ─► complete │ abandon ─► outbox
                                  └── every call of the manager happens on this thread

Owns the order of things in one iteration and nothing else: what runs is the scheduler's decision, what
differs between the roles is in `context_worker` and `generation_worker`. Outcomes are drained even when
nothing is schedulable (C5, I5).
"""

import logging
import time
from collections import deque
from collections.abc import Callable
from typing import assert_never

from kvtransfer.messages import LeaseOutcome, ReceiveOutcome, ReservationExpired
from manager import RequestId
from scheduler.errors import InvalidRequest
from scheduler.introductions import WorkerIntroduction
from scheduler.messages import (
    CancelAttempt,
    Cancelled,
    CommandBatch,
    Deferred,
    DeliverHandoff,
    ErrorKind,
    Failed,
    Finished,
    Handoff,
    OfferGeneration,
    RenewLeases,
    RoomReported,
    RunContext,
    RunLocal,
    WorkerCommand,
    WorkerRegistration,
    WorkerSnapshot,
    WorkerState,
)
from scheduler.output import DrawnToken, SchedulerOutput
from scheduler.request import Request
from scheduler.spec import AttemptId, FinishReason, Term
from scheduler.states import AttemptState
from scheduler.tickets import DeliverPart
from serving.engine.batch import StepResult
from serving.tracing.history import StepHistory, WorkerHistory
from serving.workers.context_parts import ContextParts
from serving.workers.context_worker import ContextSide
from serving.workers.generation_worker import GenerationSide
from serving.workers.introduction import IntroductionSink, held_parts
from serving.workers.phase_clock import PhaseClock
from serving.workers.token_scores import TokenScores
from serving.workers.worker_parts import WorkerParts
from serving.workers.worker_plan import WorkerIdentity

_log = logging.getLogger("pdserve.worker")
_COUNTER_NAMES = ("audits", "refused_terms", "failed_steps", "ignored_commands", "late_signals")


class WorkerLoop:
    """Runs one worker. `post` and `snapshot` may be called from any thread, the rest from the loop's."""

    def __init__(
        self, identity: WorkerIdentity, parts: WorkerParts, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Start idle; `run_once` drives it."""
        self._identity = identity
        self._parts = parts
        self._scheduler = parts.scheduler
        self._outbox = parts.outbox
        self._clock = clock
        self._inbox: deque[tuple[float, CommandBatch]] = deque()
        self._asked: deque[tuple[Term, WorkerRegistration, IntroductionSink]] = deque()
        self._term = Term(0)
        self._commands_seen: tuple[Term, int] | None = None
        self._busy_since_s: float | None = None
        self._history = StepHistory()
        self._phases = PhaseClock(identity.name, self._history)
        self._scores = TokenScores()
        self._counts = dict.fromkeys(_COUNTER_NAMES, 0)
        context_parts = ContextParts(parts.manager, parts.scheduler, parts.agent, parts.outbox, parts.staging)
        self._context_side = ContextSide(parts.scheduler, parts.agent, parts.outbox, parts.staging, context_parts)
        self._generation_side = GenerationSide(
            parts.manager, parts.scheduler, parts.agent, parts.outbox, self._phases, parts.staging
        )
        self._snapshot = self._make_snapshot()

    # -- any thread --------------------------------------------------------------------------------

    def post(self, batch: CommandBatch) -> None:
        """Queue commands; the loop takes them before its next pass."""
        self._inbox.append((self._clock(), batch))
        self._parts.wake.set()

    def introduce(self, term: Term, registration: WorkerRegistration, sink: IntroductionSink) -> None:
        """A central scheduler asks what is held here; the loop answers between two iterations (C6)."""
        self._asked.append((term, registration, sink))
        self._parts.wake.set()

    def wake(self) -> None:
        """Do not sleep on."""
        self._parts.wake.set()

    def snapshot(self) -> WorkerSnapshot:
        """The account of the last finished iteration."""
        return self._snapshot

    def history(self, seconds: float) -> WorkerHistory:
        """What was done in the last `seconds`."""
        now_s, identity = self._clock(), self._identity
        told = self._history.tell(self._phases.present(now_s), now_s, seconds)
        return WorkerHistory(identity.name, identity.role, identity.pid, identity.epoch, *told)

    @property
    def longest_step_s(self) -> float:
        """The longest step so far: the bound for a hung worker (C5)."""
        return self._history.longest_step_s

    @property
    def busy_s(self) -> float:
        """How long the present iteration has lasted; 0 between two."""
        since_s = self._busy_since_s
        return 0.0 if since_s is None else self._clock() - since_s

    # -- the loop's thread -------------------------------------------------------------------------

    def wait(self, timeout_s: float) -> None:
        """Sleep until something is posted, an outcome arrives, or the time is over."""
        self._parts.wake.wait(timeout_s)

    def run_once(self) -> bool:
        """One iteration; returns whether anything was done."""
        self._busy_since_s = self._clock()
        # Cleared before anything is drained: what arrives from here on ends the next wait at once.
        self._parts.wake.clear()
        busy = self._take_commands()
        busy = self._take_outcomes() or busy
        if self._scheduler.has_work:
            busy = self._pass() or busy
        if busy and self._scheduler.take_room_report():
            self._outbox.report(RoomReported())
        self._report_prefixes(may_wait=busy and not self._outbox.has_reports)
        if busy:
            # First the reports, then the account: one that runs ahead of them looks like a divergence.
            self._outbox.flush()
            self._snapshot = self._make_snapshot()
        elif self._outbox.has_reports:
            self._outbox.flush()
        self._answer_introductions()
        if self._parts.self_audit.run_if_due():
            self._counts["audits"] += 1
            self._snapshot = self._make_snapshot()
        self._busy_since_s = None
        return busy

    def _report_prefixes(self, *, may_wait: bool) -> None:
        if self._parts.prefix_feed is not None:
            changes = self._parts.prefix_feed.take(self._clock(), may_wait=may_wait)
            if changes is not None:
                self._outbox.report(changes)

    def _answer_introductions(self) -> None:
        while self._asked:
            if self._parts.prefix_feed is not None:
                self._parts.prefix_feed.list_anew()
            asked, registration, sink = self._asked.popleft()
            seen, self._term = self._term, max(self._term, asked)
            parts = held_parts(self._scheduler, self._identity.role, self._context_side.leased, self._handoff)
            sink(WorkerIntroduction(registration, seen, self._outbox.num_batches, parts))

    def _handoff(self, attempt_id: AttemptId) -> Handoff | None:
        return self._context_side.handoff(attempt_id) or self._generation_side.handoff(attempt_id)

    # -- commands and outcomes ---------------------------------------------------------------------

    def _take_commands(self) -> bool:
        busy = False
        while self._inbox:
            busy = True
            came_at_s, batch = self._inbox.popleft()
            if batch.term < self._term:
                self._counts["refused_terms"] += 1
                continue
            self._term = batch.term
            self._commands_seen = (batch.term, batch.sequence)
            for command in batch.commands:
                self._on_command(command, came_at_s)
        return busy

    def _on_command(self, command: WorkerCommand, came_at_s: float) -> None:
        now_s = self._clock()
        match command:
            case RunContext() | RunLocal() | OfferGeneration():
                self._admit(command, now_s, came_at_s)
            case DeliverHandoff():
                self._generation_side.deliver(command, now_s)
            case DeliverPart():
                self._generation_side.deliver_part(command, now_s)
            case CancelAttempt():
                self._end(command.attempt_id, now_s)
            case RenewLeases():
                self._parts.agent.renew(command.lease_ids, now_s)
                self._parts.agent.renew_reservations(map(RequestId, command.reservations), now_s)
            case _:
                assert_never(command)

    def _admit(self, command: RunContext | RunLocal | OfferGeneration, now_s: float, came_at_s: float) -> None:
        if self._scheduler.get(command.attempt_id) is not None:
            self._counts["ignored_commands"] += 1
            return
        everyone = (command.attempt_id, *(follower.attempt_id for follower in command.followers))
        if self._scheduler.is_quarantined(command.attempt_id):
            # A new term does not know that it has ended here, and its name still owns pages and window.
            message = f"attempt {command.attempt_id} has ended on {self._identity.name}, which still clears up after it"
            for attempt_id in everyone:
                self._outbox.report(Failed(attempt_id, ErrorKind.TRANSFER, message, retriable=True))
            return
        try:
            if isinstance(command, OfferGeneration):
                self._generation_side.offer(command, now_s)
            else:
                self._scheduler.add_context(command.attempt_id, command.spec, now_s, command.followers)
                if isinstance(command, RunContext) and command.has_reader and self._parts.overlaps:
                    self._context_side.parts.expect(command.attempt_id)
        except InvalidRequest as error:
            for attempt_id in everyone:
                self._outbox.report(Failed(attempt_id, ErrorKind.NEVER_FITS, str(error), retriable=False))
            return
        phase = "offer" if isinstance(command, OfferGeneration) else "queue"
        # From its coming: what waits for the step before it waits in this worker's queue.
        self._phases.admit(command.attempt_id, command.spec.uid, phase, command.waited_s, came_at_s)
        if not isinstance(command, OfferGeneration):
            for follower in command.followers:
                self._phases.admit(follower.attempt_id, follower.spec.uid, phase, command.waited_s, came_at_s)

    def _end(self, attempt_id: AttemptId, now_s: float) -> None:
        request = self._scheduler.get(attempt_id)
        if request is None:
            self._counts["ignored_commands"] += 1
            return
        was_receiving = request.state is AttemptState.DISAGG_GENERATION_TRANS_IN_PROGRESS
        self._scheduler.cancel(attempt_id, now_s)
        if was_receiving:
            self._generation_side.stop_receive(request, now_s)
        self._context_side.drop_lease(attempt_id, now_s)
        self._forget(attempt_id)
        self._outbox.report(Cancelled(attempt_id))

    def _take_outcomes(self) -> bool:
        outcomes = self._parts.agent.take_outcomes()
        for outcome in outcomes:
            match outcome:
                case ReceiveOutcome():
                    self._generation_side.on_receive(outcome, self._clock())
                case LeaseOutcome():
                    self._context_side.on_lease(outcome, self._clock())
                case ReservationExpired():
                    is_live = self._generation_side.on_reservation_expired(outcome, self._clock())
                    self._counts["late_signals"] += not is_live
                case _:
                    assert_never(outcome)
        return bool(outcomes)

    # -- one pass and its step ---------------------------------------------------------------------

    def _pass(self) -> bool:
        output = self._scheduler.schedule(self._clock())
        self._history.iteration = output.iteration
        lost = self._parts.manager.finish_fills()
        if lost:
            output = self._scheduler.on_pages_lost(output, lost, self._clock())
        for request in output.reserved:
            self._phases.enter(request.attempt_id, "transfer", self._clock())
            self._generation_side.on_reserved(request, self._clock())
        for request in output.pushed_out:
            self._phases.enter(request.attempt_id, "paused", self._clock())
        for request, deferral in output.deferred:
            self._forget(request.attempt_id)
            self._outbox.report(Deferred(request.attempt_id, deferral.reason, deferral.needed, deferral.available))
        for request, message in output.failed:
            self._fail(request, ErrorKind.NEVER_FITS, message, retriable=False)
        for request in output.sent_away:
            message = f"request {request.spec.uid}: lost its pages on {self._identity.name}, computed again elsewhere"
            self._fail(request, ErrorKind.WORKER_LOST, message, retriable=True)
        if output.deadlock is not None:
            _log.error("%s: nothing can run: %s", self._identity.name, output.deadlock)
        if output.has_step:
            self._step(output)
        return output.has_step or bool(output.reserved or output.deferred or output.failed or output.sent_away)

    def _step(self, output: SchedulerOutput) -> None:
        started_s = self._clock()
        for chunk in output.contexts:
            self._phases.enter(chunk.request.attempt_id, "context", started_s)
        try:
            result = self._parts.engine.step(self._parts.batch_builder.build(output, self._scheduler.drawers))
        except Exception as error:  # the engine is arbitrary code over arbitrary memory: V22 covers all of it
            _log.exception("step %d failed", output.iteration)
            self._history.on_step(output, started_s, self._clock())
            self._abandon(output, error)
            return
        ended_s = self._clock()
        self._history.on_step(output, started_s, ended_s)
        for chunk in output.contexts:
            self._phases.chunk(chunk.request.attempt_id, chunk.num_tokens, started_s, ended_s)
        self._complete(output, result)

    def _abandon(self, output: SchedulerOutput, error: Exception) -> None:
        self._counts["failed_steps"] += 1
        abandoned = self._scheduler.abandon(output, self._clock())
        for request in abandoned.failed:
            message = f"request {request.spec.uid}: the engine failed in step {output.iteration}: {error}"
            self._fail(request, ErrorKind.ENGINE, message, retriable=False)

    def _complete(self, output: SchedulerOutput, result: StepResult) -> None:
        requests = [request for chunk in output.contexts for request in self._scheduler.drawers(chunk)]
        requests += output.generations
        drawn = {}
        for request in requests:
            token_id = result.token_ids[request.request_id]
            drawn[request.request_id] = DrawnToken(token_id, self._parts.stop_checker.check(request, token_id))
        self._scores.take(output, result)
        completed = self._scheduler.complete(output, drawn, self._clock())
        now_s = self._clock()
        self._context_side.parts.offer(output.contexts, now_s)
        faults = {}
        for request, position, token in completed.tokens:
            if (fault := self._parts.batch_builder.fault(request.attempt_id)) is not None:
                faults[request.attempt_id] = (request, fault)
                continue
            self._phases.enter(request.attempt_id, "generation", now_s)
            durations = None
            if self._phases.is_first_token(request.attempt_id) or token.finish_reason is not None:
                durations = self._phases.durations(request, now_s)
            self._outbox.token(request, position, token, durations, self._scores.of_token(request, position, result))
            if token.finish_reason is not None:
                self._finish(request, token.finish_reason)
        for request, lease in completed.leases:
            self._context_side.hand_over(request, lease, now_s)
            self._forget(request.attempt_id)
        for request, carrier in completed.shared:
            if request.attempt_id not in faults:
                self._context_side.share(request, carrier)
            self._forget(request.attempt_id)
        for request, fault in faults.values():
            self._scheduler.fail(request.attempt_id, now_s)
            self._context_side.drop_lease(request.attempt_id, now_s)
            self._fail(request, ErrorKind.INVALID, fault, retriable=False)

    def _finish(self, request: Request, reason: FinishReason) -> None:
        self._forget(request.attempt_id)
        if request.state is AttemptState.DISAGG_CONTEXT_COMPLETE:
            self._context_side.finished_by_first_token(request)
        else:
            self._outbox.report(Finished(request.attempt_id, reason))

    def _fail(self, request: Request, kind: ErrorKind, message: str, *, retriable: bool) -> None:
        self._forget(request.attempt_id)
        self._context_side.parts.drop(request.attempt_id)
        self._outbox.report(Failed(request.attempt_id, kind, message, retriable=retriable))

    def _forget(self, attempt_id: AttemptId) -> None:
        self._phases.forget(attempt_id, self._clock())
        self._scores.forget(attempt_id)
        self._parts.stop_checker.forget(attempt_id)
        self._parts.batch_builder.forget(attempt_id)
        self._generation_side.forget(attempt_id)

    # -- accounts ----------------------------------------------------------------------------------

    def _make_snapshot(self) -> WorkerSnapshot:
        counters = dict(self._scheduler.counters())
        transfers = self._parts.agent.counters()
        late_signals = sum(counts["late_signals"] for counts in (counters, transfers, self._counts))
        counters.update(transfers)
        counters["transfers"] = transfers["receives_verified"]
        counters["transfer_bytes"] = transfers["bytes_received"]
        counters.update(self._counts)
        counters["parts_offered"] = self._context_side.parts.num_offered
        counters["parts_received"] = self._generation_side.num_parts
        counters["exposed_bytes"] = self._generation_side.exposed_bytes
        counters["late_signals"] = late_signals
        return WorkerSnapshot(
            worker=self._identity.name,
            role=self._identity.role,
            epoch=self._identity.epoch,
            pid=self._identity.pid,
            state=WorkerState.RUNNING,
            iteration=self._history.iteration,
            running=tuple(request.attempt_id for request in self._scheduler.running),
            waiting=tuple(request.attempt_id for request in self._scheduler.waiting),
            stats=self._parts.manager.stats(),
            counters=counters,
            transports=self._parts.transport_choices(),
            commands_seen=self._commands_seen,
        )
