"""`PassEffects`: what follows from a pass outside the manager, once its transaction has ended.

States, places and counts; nothing that can fail for want of anything. A pass that was rolled back still
answers its offers, since deferred ones hold nothing either way.
"""

from collections import Counter
from collections.abc import Collection
from dataclasses import replace

from manager import Availability, RequestId
from scheduler.iteration_pass import PassDecisions
from scheduler.output import SchedulerOutput
from scheduler.request import Request
from scheduler.request_table import RequestTable
from scheduler.states import AttemptEvent, AttemptState


class PassEffects:
    """Applies decisions to the table of one worker."""

    __slots__ = ("_counters", "_remote_min_tokens", "_table")

    def __init__(self, table: RequestTable, counters: "Counter[str]", remote_min_tokens: int | None) -> None:
        """Collaborators of one scheduler.

        Args:
            table: where the requests are.
            counters: the scheduler's cumulative counts.
            remote_min_tokens: known tokens from which on a decode that lost its pages leaves; None for never.
        """
        self._table = table
        self._counters = counters
        self._remote_min_tokens = remote_min_tokens

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
        for victim, was_suspended in decisions.pushed_out.values():
            self._push_out(victim, now_s, was_suspended=was_suspended)
        num_suspended = sum(was_suspended for _, was_suspended in decisions.pushed_out.values())
        sent_away = [victim for victim, _ in decisions.pushed_out.values() if victim.is_terminal]
        for request in decisions.resumed:
            request.on_event(AttemptEvent.RESUMED, now_s)
        for request in decisions.reserved:
            request.on_event(AttemptEvent.RESERVED, now_s)
            self._table.move_to_receiving(request)
        for request, _ in decisions.failed:
            request.on_event(AttemptEvent.FAIL, now_s)
            self._table.leave(request)
        chunked = {chunk.request.request_id for chunk in decisions.chunks}
        self._counters["forks"] += len({request.request_id for request in decisions.forked} & chunked)
        num_recomputed = len(decisions.pushed_out) - num_suspended - len(sent_away)
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
            sent_away=tuple(sent_away),
            pushed_out=tuple(victim for victim, _ in decisions.pushed_out.values() if not victim.is_terminal),
            num_suspended=num_suspended,
            num_recomputed=num_recomputed,
            num_resumed=len(decisions.resumed),
        )

    def drop_lost(self, output: SchedulerOutput, request_ids: Collection[RequestId], now_s: float) -> SchedulerOutput:
        """Take requests whose caches are gone out of a committed plan; each starts again, or leaves.

        A reservation among them has no attempt to go on with here: it fails, and is computed elsewhere.
        """
        table = self._table
        failed = [request for request in output.reserved if request.request_id in request_ids]
        for request in failed:
            request.on_event(AttemptEvent.FAIL, now_s)
            table.leave(request)
        for request_id in request_ids:
            generation = table.generations.get(request_id)
            if generation is not None:
                self._push_out(generation, now_s, was_suspended=False)
        drafts = output.draft_lengths or (0,) * len(output.generations)
        kept = [
            (request, draft)
            for request, draft in zip(output.generations, drafts, strict=True)
            if request.request_id not in request_ids
        ]
        self._counters["lost_pages"] += len(request_ids)
        return replace(
            output,
            contexts=tuple(chunk for chunk in output.contexts if chunk.request.request_id not in request_ids),
            generations=tuple(request for request, _ in kept),
            draft_lengths=tuple(draft for _, draft in kept) if output.draft_lengths else (),
            reserved=tuple(request for request in output.reserved if request not in failed),
            sent_away=(*output.sent_away, *failed),
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

    def _push_out(self, victim: Request, now_s: float, *, was_suspended: bool) -> None:
        """A context keeps its state: it continues, or starts again, as the context it is."""
        if victim.state is AttemptState.GENERATION_IN_PROGRESS:
            victim.on_event(AttemptEvent.SUSPENDED, now_s)
        if victim.state is not AttemptState.GENERATION_PAUSED or was_suspended:
            return
        if self._remote_min_tokens is not None and len(victim.token_ids) >= self._remote_min_tokens:
            victim.on_event(AttemptEvent.FAIL, now_s)
            self._table.leave(victim)
            self._counters["sent_away"] += 1
        else:
            victim.on_event(AttemptEvent.RECOMPUTE, now_s)
            self._table.move_to_contexts(victim)
