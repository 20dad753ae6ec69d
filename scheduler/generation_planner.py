"""Seats the running generations of a pass, oldest first, pushing out from the tail when pages are short."""

from collections.abc import Callable

from manager import Grant, Refusal, RefusalReason
from scheduler.iteration_pass import IterationPass
from scheduler.request import Request, WithDrafts
from scheduler.request_table import RequestTable
from scheduler.states import AttemptEvent, AttemptState


class GenerationPlanner:
    """The first part of a pass (S1, S3)."""

    __slots__ = ("_fresh_first", "_plan", "_table")

    def __init__(self, plan: IterationPass, table: RequestTable, *, fresh_first: bool) -> None:
        """Made for one pass; reads the table and changes nothing in it.

        Args:
            plan: the open pass.
            table: where the requests are.
            fresh_first: a freshly received request goes before all others, once.
        """
        self._plan = plan
        self._table = table
        self._fresh_first = fresh_first

    def run(self) -> None:
        """Try every generation once.

        After the first refusal, requests that hold device pages still advance, but nobody resumes: room
        that appears now belongs to the one that was refused (B1, B15).
        """
        plan, budget = self._plan, self._plan.budget
        line = self._in_line()
        for place, request in enumerate(line):
            if not budget.has_seat(1):
                break
            is_paused = request.state is AttemptState.GENERATION_PAUSED
            if plan.is_pushed_out(request) or (is_paused and plan.decisions.blocked_by is not None):
                continue
            # Drafts get only rows that no decode behind needs for its own token.
            behind = min(len(line) - place - 1, budget.requests - 1)
            num_drafts = max(0, min(request.num_draft_tokens, budget.rows - 1 - behind))
            self._seat(request, num_drafts, is_paused=is_paused)

    def _in_line(self) -> list[Request]:
        line = self._table.ordering.first_to_last(self._table.generations.values())
        if self._fresh_first:
            line.sort(key=lambda request: request.history[-1].event is not AttemptEvent.ACTIVATED)
        return line

    def _seat(self, request: Request, num_drafts: int, *, is_paused: bool) -> None:
        plan = self._plan
        answer = plan.try_with_victims(request, self._allocation(num_drafts), lambda: self._victims(request))
        if not isinstance(answer, Refusal):
            plan.budget.take_rows(1 + answer)
            plan.decisions.generations[request.request_id] = (request, answer)
            if is_paused:
                plan.decisions.resumed.append(request)
            return
        if answer.reason is RefusalReason.NEVER_FITS:
            plan.fail(request, answer)
            return
        plan.block(answer)
        if not is_paused:
            plan.push_out(request)
        elif answer.reason is RefusalReason.OVER_RESUME_WATERMARK and self._is_alone():
            # Nobody's end will lower the use of the device: only starting again from nothing can.
            plan.restart_suspended(request)

    def _allocation(self, num_drafts: int) -> Callable[[Request], int | Refusal]:
        """An attempt that gives the draft length that has a place: all of it, or where pages are short none.

        Nobody is pushed out for the sake of drafts: the attempt without them comes before any victim.
        """

        def allocate(request: Request) -> int | Refusal:
            manager, budget = self._plan.manager, self._plan.budget
            lengths = (num_drafts, 0) if num_drafts else (0,)
            answer: Grant | Refusal | None = None
            for length in lengths:
                same = length == request.num_draft_tokens
                answer = manager.try_allocate_generation(request if same else WithDrafts(request, length))
                if isinstance(answer, Grant):
                    budget.commit(answer)
                    return length
            assert isinstance(answer, Refusal)
            return answer

        return allocate

    def _victims(self, request: Request) -> list[Request]:
        """A context never keeps what a running decode needs (S1), so started contexts go first."""
        table, plan = self._table, self._plan
        contexts = reversed(table.ordering.first_to_last(table.contexts.values()))
        behind = table.ordering.victims_behind(request, table.generations.values())
        seated = plan.decisions.generations
        return [
            other
            for other in (*contexts, *behind)
            if plan.is_active(other) and other.request_id not in seated and not plan.is_pushed_out(other)
        ]

    def _is_alone(self) -> bool:
        if self._table.has_pages_in_flight:
            return False
        return not any(self._plan.is_active(other) for other in self._table.admitted())
