"""`PassEffects`: what follows from a pass outside the manager, once its transaction has ended.

States, places and counts; nothing that can fail for want of anything. A pass that was rolled back still
answers its offers, since deferred ones hold nothing either way.
"""

from collections import Counter
from dataclasses import replace

from manager import Availability
from scheduler.iteration_pass import PassDecisions
from scheduler.output import SchedulerOutput
from scheduler.request import Request
from scheduler.request_table import RequestTable
from scheduler.states import AttemptEvent, AttemptState


class PassEffects:
    """Applies decisions to the table of one worker."""

    __slots__ = ("_counters", "_table")

    def __init__(self, table: RequestTable, counters: "Counter[str]") -> None:
        """`counters` are the scheduler's cumulative counts."""
        self._table = table
        self._counters = counters

    def apply(self, decisions: PassDecisions, *, is_committed: bool, now_s: float) -> SchedulerOutput:
        """Make requests and places agree with what the manager has published."""
        for request, _ in decisions.deferred:
            request.on_event(AttemptEvent.DEFERRED, now_s)
            self._table.leave(request)
        self._counters["deferrals"] += len(decisions.deferred)
        if not is_committed:
            self._counters["rollbacks"] += 1
            return SchedulerOutput(self._counters["iterations"], deferred=tuple(decisions.deferred))
        for request in decisions.started:
            self._table.move_to_contexts(request)
        started = {request.request_id for request in decisions.started}
        self._table.return_to_line(r for r in decisions.out_of_line if r.request_id not in started)
        for request, reused_tokens in decisions.claims:
            request.num_reused_tokens = reused_tokens
        num_suspended = sum(self._push_out(*entry, now_s) for entry in decisions.pushed_out.values())
        for request in decisions.resumed:
            request.on_event(AttemptEvent.RESUMED, now_s)
        for request in decisions.reserved:
            request.on_event(AttemptEvent.RESERVED, now_s)
            self._table.move_to_receiving(request)
        for request, _ in decisions.failed:
            request.on_event(AttemptEvent.FAIL, now_s)
            self._table.leave(request)
        num_recomputed = len(decisions.pushed_out) - num_suspended
        self._counters["suspensions"] += num_suspended
        self._counters["recomputes"] += num_recomputed
        self._counters["resumes"] += len(decisions.resumed)
        self._counters["duplicate_deferrals"] += decisions.num_duplicates
        return SchedulerOutput(
            iteration=self._counters["iterations"],
            contexts=tuple(decisions.chunks),
            generations=tuple(decisions.decoding()),
            draft_lengths=tuple(length for _, length in decisions.generations.values()),
            reserved=tuple(decisions.reserved),
            deferred=tuple(decisions.deferred),
            failed=tuple(decisions.failed),
            num_suspended=num_suspended,
            num_recomputed=num_recomputed,
            num_resumed=len(decisions.resumed),
        )

    def with_deadlock(
        self, output: SchedulerOutput, decisions: PassDecisions, availability: Availability
    ) -> SchedulerOutput:
        """Report a pass without a result when nothing in flight could change that (S5)."""
        table = self._table
        num_stuck = table.num_admitted + len(table.waiting) + len(decisions.deferred)
        if not num_stuck or table.has_pages_in_flight:
            return output
        first = decisions.blocked_by if decisions.blocked_by is not None else "no refusal"
        text = (
            f"{len(table.generations)} generations, {len(table.contexts)} started and {len(table.waiting)} waiting "
            f"contexts, {len(decisions.deferred)} offers: none can run and no lease, transfer or quarantine is in "
            f"flight; {first}; pages={dict(availability.pages)} index_slots={availability.index_slots}"
        )
        return replace(output, deadlock=text)

    def _push_out(self, victim: Request, was_suspended: bool, now_s: float) -> int:  # noqa: FBT001 -- an entry of the list
        """A context keeps its state: it continues, or starts again, as the context it is."""
        if victim.state is AttemptState.GENERATION_IN_PROGRESS:
            victim.on_event(AttemptEvent.SUSPENDED, now_s)
        if victim.state is AttemptState.GENERATION_PAUSED and not was_suspended:
            victim.on_event(AttemptEvent.RECOMPUTE, now_s)
            self._table.move_to_contexts(victim)
        return int(was_suspended)
