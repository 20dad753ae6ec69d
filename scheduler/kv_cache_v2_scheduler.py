"""`KVCacheV2Scheduler`: one worker's iterations, beside its manager (design S1 to S7).

    schedule()  plan:      generations -> offers -> contexts, in one transaction, then prove the budget
                commit:    the manager publishes
                apply:     states, places and counts follow; nothing here can fail
    complete() / abandon() close the step in a complete transaction

Knows no clock, no thread and no tensor. Everything that a pass tries lives in the manager's transaction
until its commit; requests and lists change after it only, from `PassDecisions`. So a pass that raises
anywhere has changed nothing (V6, V7).

Source: TensorRT-LLM's `KVCacheV2Scheduler`, whose order of work and words this keeps. There an attempt
acts at once and is taken back by hand in the cases somebody thought of; here nothing acts before the commit.
"""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from configs import SchedulerConfig
from manager import KVCacheManager, LeaseId, PageLease, RequestId
from scheduler.admission import TransferAdmission, TransferWindow
from scheduler.budget import BudgetTracker
from scheduler.context_planner import ContextPlanner
from scheduler.errors import CallOutOfTurn, InvalidConfiguration, InvalidRequest, RequestTooLarge
from scheduler.generation_planner import GenerationPlanner
from scheduler.handoff_outcomes import HandoffOutcomes
from scheduler.iteration_pass import IterationPass, PassDecisions, newest_suspended
from scheduler.messages import Handoff, WorkerRole
from scheduler.offer_planner import OfferPlanner
from scheduler.output import (
    OLDER_REQUEST_WAITS,
    AbandonedStep,
    CompletedStep,
    ContextChunk,
    DrawnToken,
    SchedulerOutput,
)
from scheduler.pass_effects import PassEffects
from scheduler.policy import CacheShape, Ordering, PageReckoning
from scheduler.request import Request
from scheduler.request_table import Offer, RequestTable
from scheduler.spec import AttemptId, Follower, RequestSpec
from scheduler.states import AttemptEvent, AttemptState
from scheduler.step_completion import StepCompletion

_COUNTER_NAMES = (
    "iterations", "deferrals", "rollbacks", "suspensions", "recomputes", "resumes", "abandoned_steps",
    "lost_pages", "late_signals", "duplicate_deferrals", "sent_away",
    "forks", "shared_prefills",
)  # fmt: skip


class KVCacheV2Scheduler:
    """Implements `IterationScheduler` for one worker. One thread only."""

    def __init__(
        self,
        config: SchedulerConfig,
        manager: KVCacheManager,
        role: WorkerRole,
        shape: CacheShape,
        *,
        window: TransferWindow | None = None,
    ) -> None:
        """Collaborators of one worker.

        Args:
            config: budgets and policies.
            manager: the cache of this worker; only this scheduler opens its transactions.
            role: what the worker computes.
            shape: the cache's sizes, see `CacheShape`.
            window: bytes that may be on their way here; None is without limit.

        Raises:
            InvalidConfiguration: a batch could not get its index slots (V21).
        """
        slots = manager.stats().index_slots_total
        if config.max_batch_size > slots:
            msg = f"max_batch_size={config.max_batch_size} is above the {slots} index slots of the cache"
            raise InvalidConfiguration(msg)
        self._config = config
        self._manager = manager
        self._role = role
        self._shape = shape
        self._window: TransferWindow = TransferAdmission(None) if window is None else window
        self._reckoning = PageReckoning(shape, config)
        self._counters: Counter[str] = Counter(dict.fromkeys(_COUNTER_NAMES, 0))
        self._table = RequestTable(Ordering(config.arrivals_per_priority))
        remote_min_tokens = config.recompute_remote_min_tokens if role is WorkerRole.GENERATION else 0
        self._effects = PassEffects(self._table, self._counters, remote_min_tokens or None)
        self._outcomes = HandoffOutcomes(manager, self._table, self._window, self._counters)
        self._completion = StepCompletion(manager, self._table, role, max_step_retries=config.max_step_retries)
        self._num_arrivals = 0
        self._open_output: SchedulerOutput | None = None
        self._starved: Request | None = None
        self._is_idle_until_event = False
        self._owes_room_report = False
        self._has_room_to_report = False
        self._deferred_for_older = False

    # -- arrivals ------------------------------------------------------------------------------------

    def add_context(
        self, attempt_id: AttemptId, spec: RequestSpec, now_s: float, followers: Sequence[Follower] = ()
    ) -> Request:
        """Queue a context, and who shares it. Raises RequestTooLarge or InvalidRequest; nothing is queued then."""
        request = self._arrive(attempt_id, spec, AttemptState.CONTEXT_INIT, now_s)
        self._follow(request, followers, now_s)
        self._table.waiting.push(request)
        self._counters["shared_prefills"] += len(followers)
        return request

    def _follow(self, request: Request, followers: Sequence[Follower], now_s: float) -> None:
        """Let them arrive behind `request`, or let it go, too, and raise."""
        sharing: list[Request] = []
        try:
            for follower in followers:
                sharing.append(self._arrive(follower.attempt_id, follower.spec, AttemptState.CONTEXT_INIT, now_s))
                sharing[-1].first_token_id = follower.first_token_id
        except InvalidRequest:
            for arrived in (request, *sharing):
                self._table.leave(arrived)
            raise
        self._table.follow(request, sharing)

    def followers_of(self, request_id: RequestId) -> Sequence[Request]:
        """Who waits for the context, or the transfer, of this attempt."""
        return tuple(self._table.followers.get(request_id, ()))

    def drawers(self, chunk: ContextChunk) -> Sequence[Request]:
        """Who draws a token from the logits of a chunk of the open step, its own request first."""
        return self._table.drawers(chunk)

    def add_generation_offer(
        self,
        attempt_id: AttemptId,
        spec: RequestSpec,
        handoff: Handoff | None,
        now_s: float,
        followers: Sequence[Follower] = (),
    ) -> Request:
        """Queue an offer for the next plan; it holds nothing. Raises RequestTooLarge or InvalidRequest."""
        if self._role is WorkerRole.CONTEXT:
            msg = f"{attempt_id}: a context worker takes no offers"
            raise InvalidRequest(msg)
        request = self._arrive(attempt_id, spec, AttemptState.DISAGG_GENERATION_INIT, now_s)
        self._follow(request, followers, now_s)
        num_bytes = None if handoff is None else handoff.ticket.total_bytes
        self._table.offers[request.request_id] = Offer(request, num_bytes)
        return request

    def _arrive(self, attempt_id: AttemptId, spec: RequestSpec, state: AttemptState, now_s: float) -> Request:
        if self._table.get(attempt_id) is not None:
            msg = f"{attempt_id}: this attempt is here already"
            raise InvalidRequest(msg)
        if not spec.prompt_token_ids:
            msg = f"{attempt_id}: the prompt is empty"
            raise InvalidRequest(msg)
        self._refuse_members(attempt_id, spec)
        request = Request(spec, attempt_id, state, arrival=self._num_arrivals, now_s=now_s)
        context_only = self._role is WorkerRole.CONTEXT
        num_tokens = self._reckoning.final_tokens(request, context_only=context_only)
        if num_tokens > self._shape.max_request_tokens:
            msg = f"{attempt_id}: needs {num_tokens} tokens, this worker can hold {self._shape.max_request_tokens}"
            raise RequestTooLarge(msg)
        self._num_arrivals += 1
        self._table.enter(request)
        self._is_idle_until_event = False
        return request

    def _refuse_members(self, attempt_id: AttemptId, spec: RequestSpec) -> None:
        """Raises InvalidRequest for an adapter or an encoder input that this deployment has no place for."""
        if spec.adapter_id is not None and spec.adapter_id not in self._shape.adapters.pages:
            msg = f"{attempt_id}: this worker has no adapter {spec.adapter_id}"
            raise InvalidRequest(msg)
        if len(spec.encoder_token_ids) > self._shape.max_encoder_tokens:
            msg = (
                f"{attempt_id}: {len(spec.encoder_token_ids)} encoder tokens, this worker has room for "
                f"{self._shape.max_encoder_tokens}"
            )
            raise InvalidRequest(msg)

    # -- outcomes between steps ------------------------------------------------------------------------

    def cancel(self, attempt_id: AttemptId, now_s: float) -> Request | None:
        """End an attempt in any state and release all it holds; None when unknown or already ended."""
        return self._end(attempt_id, AttemptEvent.CANCEL, now_s)

    def fail(self, attempt_id: AttemptId, now_s: float) -> Request | None:
        """As `cancel`, with FAILED as the end."""
        return self._end(attempt_id, AttemptEvent.FAIL, now_s)

    def _end(self, attempt_id: AttemptId, event: AttemptEvent, now_s: float) -> Request | None:
        request = self._table.get(attempt_id)
        if request is None:
            return None
        self._outcomes.end(request, event, now_s)
        self._note_release()
        return request

    def on_received(self, request_id: RequestId, first_token_id: int, now_s: float) -> Request | None:
        """The transfer is verified: activate it; None for an attempt that ended meanwhile."""
        request = self._outcomes.on_received(request_id, first_token_id, now_s)
        self._note_release()
        return request

    def on_receive_ended(self, request_id: RequestId, now_s: float) -> Request | None:
        """The transfer came to nothing and nothing is written any more; returns the attempt it failed."""
        request = self._outcomes.on_receive_ended(request_id, now_s)
        self._note_release()
        return request

    def on_lease_ended(self, lease_id: LeaseId, now_s: float, *, settled: bool) -> Request | None:
        """A lease we gave is over; returns the context request, or None if unknown."""
        request = self._outcomes.on_lease_ended(lease_id, now_s, settled=settled)
        self._note_release()
        return request

    def lease_part(self, request: Request, num_tokens: int) -> PageLease:
        """Hold the first full blocks of a context that goes on, for its reader."""
        return self._outcomes.lease_part(request, num_tokens)

    def end_part(self, lease_id: LeaseId) -> None:
        """A part was read, has expired, or is wanted no more."""
        self._outcomes.end_part(lease_id)
        self._note_release()

    # -- the step --------------------------------------------------------------------------------------

    def schedule(self, now_s: float) -> SchedulerOutput:
        """One pass. Everything it did is committed when it returns, or undone when it raises."""
        if self._open_output is not None:
            msg = f"iteration {self._open_output.iteration} was neither completed nor abandoned"
            raise CallOutOfTurn(msg)
        if self._table.has_nothing_to_run:
            self._counters["iterations"] += 1
            return SchedulerOutput(self._counters["iterations"])
        decisions, is_committed = self._plan(self._run_planners)
        if not is_committed and (held := newest_suspended(self._table, self._manager)) is not None:
            # Pages that a suspended cache shared with one that has ended may lie on the device where nobody takes them.
            restart, is_committed = self._plan(lambda plan: plan.restart_suspended(held))
            decisions = replace(restart, deferred=decisions.deferred, blocked_by=decisions.blocked_by)
        self._counters["iterations"] += 1
        output = self._effects.apply(decisions, is_committed=is_committed, now_s=now_s)
        if not is_committed:
            output = self._effects.with_deadlock(output, decisions, self._manager.availability())
        self._after_pass(decisions, output)
        return output

    def on_pages_lost(
        self, output: SchedulerOutput, request_ids: Collection[RequestId], now_s: float
    ) -> SchedulerOutput:
        """Pages that the plan promised did not arrive, and their caches are gone: the rest of the step (M3)."""
        if output.has_step:
            self._check_open(output)
        remaining = self._effects.drop_lost(output, request_ids, now_s)
        for request in remaining.sent_away:
            self._window.release(request.request_id)
        self._open_output = remaining if remaining.has_step else None
        self._note_release()
        return remaining

    def complete(self, output: SchedulerOutput, drawn: Mapping[RequestId, DrawnToken], now_s: float) -> CompletedStep:
        """The step succeeded: move history, append tokens, commit blocks, lease or free what ended."""
        self._check_open(output)
        completed = self._completion.complete(output, drawn, now_s)
        self._open_output = None
        if completed.finished or completed.leases:
            self._note_release()
        return completed

    def abandon(self, output: SchedulerOutput, now_s: float) -> AbandonedStep:
        """The step failed: history stays, requests are retried, then failed (V22)."""
        self._check_open(output)
        abandoned = self._completion.abandon(output, now_s)
        self._open_output = None
        self._counters["abandoned_steps"] += 1
        if abandoned.failed:
            self._note_release()
        return abandoned

    def _plan(self, run_planners: Callable[[IterationPass], None]) -> tuple[PassDecisions, bool]:
        """Plan and commit, or undo: a pass from which nothing came is rolled back whole (V12)."""
        transaction = self._manager.begin_plan()
        decisions = PassDecisions()
        try:
            budget = BudgetTracker(
                rows=self._config.max_num_tokens,
                requests=self._config.max_batch_size,
                availability=self._manager.availability(),
            )
            run_planners(IterationPass(self._manager, transaction, budget, decisions))
            budget.reconcile(self._manager.availability())
        except BaseException:
            self._undo(decisions)
            transaction.rollback()
            raise
        if not decisions.is_worth_commit:
            self._undo(decisions)
            transaction.rollback()
            return decisions, False
        try:
            transaction.commit()  # One that fails has undone itself.
        except BaseException:
            self._undo(decisions)
            raise
        return decisions, True

    def _run_planners(self, plan: IterationPass) -> None:
        config, table = self._config, self._table
        GenerationPlanner(plan, table, fresh_first=config.fresh_generation_first).run()
        OfferPlanner(plan, table, self._reckoning, self._window, config.max_batch_size).run(self._starved)
        ContextPlanner(plan, table, self._reckoning, config, context_only=self._role is WorkerRole.CONTEXT).run()

    def _undo(self, decisions: PassDecisions) -> None:
        """Take back what a pass took outside the manager: window bytes, and places in the waiting line."""
        for request in decisions.reserved:
            self._window.release(request.request_id)
        decisions.started.clear()
        self._table.return_to_line(decisions.out_of_line)

    def _after_pass(self, decisions: PassDecisions, output: SchedulerOutput) -> None:
        self._starved = None if decisions.chunks else self._table.first_context_in_line()
        if output.has_step:
            self._open_output = output
        if output.sent_away or output.failed:
            self._note_release()
        self._is_idle_until_event = not output.has_step and not output.reserved and not decisions.restarts
        if output.deferred:
            self._owes_room_report, self._has_room_to_report = True, False
            self._deferred_for_older = output.deferred[0][1].reason == OLDER_REQUEST_WAITS
        elif self._deferred_for_older and self._is_nobody_short(decisions):
            # No page was released, but the older requests that offers had to wait for are served.
            self._has_room_to_report = True

    def _is_nobody_short(self, decisions: PassDecisions) -> bool:
        return self._starved is None and decisions.blocked_by is None and not decisions.pushed_out

    def _check_open(self, output: SchedulerOutput) -> None:
        if self._open_output is not output:
            msg = f"iteration {output.iteration} is not the open step"
            raise CallOutOfTurn(msg)

    def _note_release(self) -> None:
        self._is_idle_until_event = False
        self._has_room_to_report = True

    # -- reads -----------------------------------------------------------------------------------------

    def take_room_report(self) -> bool:
        """True once after room appeared here since the last deferral: time to offer again (C2)."""
        if not (self._owes_room_report and self._has_room_to_report):
            return False
        self._owes_room_report = self._has_room_to_report = False
        return True

    def get(self, attempt_id: AttemptId) -> Request | None:
        """A request that has not ended here."""
        return self._table.get(attempt_id)

    def is_quarantined(self, attempt_id: AttemptId) -> bool:
        """Whether it has ended here while reads may still write into its pages: it cannot come again."""
        return RequestId(attempt_id) in self._table.quarantined

    @property
    def running(self) -> Sequence[Request]:
        """Requests that hold pages here, oldest first; suspended ones included."""
        table, has_cache = self._table, self._manager.has_cache
        started = [request for request in table.contexts.values() if has_cache(request.request_id)]
        leased = [request for request in table.leased.values() if not request.is_terminal]
        holders = [*table.generations.values(), *table.receiving.values(), *started, *leased]
        return sorted(holders, key=lambda request: request.arrival)

    @property
    def waiting(self) -> Sequence[Request]:
        """Requests that hold nothing: paused for recompute, offers, then contexts in line."""
        ordering, table = self._table.ordering, self._table
        paused = [r for r in table.contexts.values() if not self._manager.has_cache(r.request_id)]
        offers = [offer.request for offer in table.offers.values()]
        following = [
            follower for group in table.followers.values() for follower in group if follower.first_token_id is None
        ]
        return [*ordering.first_to_last(paused), *offers, *table.waiting.in_order(), *following]

    @property
    def has_work(self) -> bool:
        """Whether `schedule` could produce a step or a reservation now.

        After a pass that produced nothing, only an event can change that: an arrival, an end, a release.
        """
        return not (self._is_idle_until_event or self._table.has_nothing_to_run)

    def counters(self) -> Mapping[str, int]:
        """Cumulative counts by name."""
        return dict(self._counters)
