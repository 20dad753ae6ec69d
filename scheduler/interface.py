"""The iteration scheduler's contract (design S1 to S7): who calls what, and when.

`KVCacheV2Scheduler` implements it. The loop of a worker calls, on one thread:

    add_*, cancel, on_*        when a command or an outcome arrives (between steps)
    schedule()                 once an iteration: one plan transaction, committed or rolled back inside
    complete() or abandon()    exactly once after each schedule() whose output `has_step`

The scheduler opens and ends the manager's transactions; nobody else does. It has no clock: `now_s` is
the caller's monotonic seconds, and only lands in histories.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from manager import LeaseId, PageLease, RequestId
from scheduler.messages import Handoff
from scheduler.output import AbandonedStep, CompletedStep, ContextChunk, DrawnToken, SchedulerOutput
from scheduler.request import Request
from scheduler.spec import AttemptId, Follower, RequestSpec


class IterationScheduler(Protocol):
    """What `KVCacheV2Scheduler` offers."""

    def add_context(
        self, attempt_id: AttemptId, spec: RequestSpec, now_s: float, followers: Sequence[Follower] = ()
    ) -> Request:
        """Queue a context. Raises RequestTooLarge (nothing queued) when it can never fit.

        `followers`, choices of the same prompt, draw their first tokens from its logits and go on alone, forked from
        it where they can be. Should it end before, the first of them computes the context.
        """
        ...

    def drawers(self, chunk: ContextChunk) -> Sequence[Request]:
        """Who draws a token from the logits of a chunk of the open step, its own request first."""
        ...

    def add_generation_offer(
        self,
        attempt_id: AttemptId,
        spec: RequestSpec,
        handoff: Handoff | None,
        now_s: float,
        followers: Sequence[Follower] = (),
    ) -> Request:
        """Queue an offer for the next plan. It holds nothing (C1a). Raises RequestTooLarge.

        `followers` have their first tokens: they start once it is activated, forked from it, and end with it before.
        """
        ...

    def followers_of(self, request_id: RequestId) -> Sequence[Request]:
        """Who waits for the context, or the transfer, of this attempt."""
        ...

    def cancel(self, attempt_id: AttemptId, now_s: float) -> Request | None:
        """End an attempt in any state and release all it holds; None when unknown or already ended.

        A request in DISAGG_GENERATION_TRANS_IN_PROGRESS has its filling pages quarantined; the loop
        cancels the receive and calls `on_receive_ended` when the agent says that nothing is written.
        A leased context's pages stay until `on_lease_ended`.
        """
        ...

    def fail(self, attempt_id: AttemptId, now_s: float) -> Request | None:
        """As `cancel`, with FAILED as the end."""
        ...

    def on_received(self, request_id: RequestId, first_token_id: int, now_s: float) -> Request | None:
        """The transfer is verified: activate (a complete transaction).

        For an attempt that was cancelled meanwhile its quarantine is released and None returned.
        """
        ...

    def on_receive_ended(self, request_id: RequestId, now_s: float) -> Request | None:
        """The transfer failed, expired or was cancelled, and nothing is written any more.

        The pages are released; the attempt, if it still runs, becomes FAILED and is returned.
        """
        ...

    def on_lease_ended(self, lease_id: LeaseId, now_s: float, *, settled: bool) -> Request | None:
        """A lease we gave is over: drop its holds; returns the context request, or None if unknown."""
        ...

    def lease_part(self, request: Request, num_tokens: int) -> PageLease:
        """After a step: hold the full blocks of the first `num_tokens` positions of a context that goes on.

        Ends by `end_part`, whatever becomes of the request. Draft layers, if any, must be where the others are.
        """
        ...

    def end_part(self, lease_id: LeaseId) -> None:
        """A part was read, has expired, or is wanted no more: drop its holds. Once."""
        ...

    def schedule(self, now_s: float) -> SchedulerOutput:
        """One pass. Everything it did is committed when it returns, or undone when it raises."""
        ...

    def on_pages_lost(
        self, output: SchedulerOutput, request_ids: Collection[RequestId], now_s: float
    ) -> SchedulerOutput:
        """Copies that the plan started have failed and the manager has let these caches go (M3).

        Called between `schedule` and its step. Returns the plan without them; they are computed again.
        """
        ...

    def complete(self, output: SchedulerOutput, drawn: Mapping[RequestId, DrawnToken], now_s: float) -> CompletedStep:
        """The step succeeded: move history, append tokens, commit blocks, lease or free what ended."""
        ...

    def abandon(self, output: SchedulerOutput, now_s: float) -> AbandonedStep:
        """The step failed: history stays, requests are retried, then failed (V22)."""
        ...

    def take_room_report(self) -> bool:
        """True once after room appeared here since the last deferral: time to offer again (C2)."""
        ...

    def get(self, attempt_id: AttemptId) -> Request | None:
        """A request that has not ended here."""
        ...

    def is_quarantined(self, attempt_id: AttemptId) -> bool:
        """Whether it has ended here while reads may still write into its pages: it cannot come again."""
        ...

    @property
    def running(self) -> Sequence[Request]:
        """Requests that hold pages here, oldest first."""
        ...

    @property
    def waiting(self) -> Sequence[Request]:
        """Requests that hold nothing yet, in order of admission."""
        ...

    @property
    def has_work(self) -> bool:
        """Whether `schedule` could produce a step or a reservation now."""
        ...

    def counters(self) -> Mapping[str, int]:
        """Cumulative counts.

        iterations, deferrals, rollbacks, suspensions, recomputes, resumes, abandoned_steps.
        """
        ...
