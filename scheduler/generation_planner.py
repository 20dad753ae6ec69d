"""Seats the running generations of a pass, oldest first, pushing out from the tail when pages are short."""

from collections.abc import Callable

from manager import Grant, Refusal, RefusalReason
from scheduler.iteration_pass import IterationPass
from scheduler.request import Request
from scheduler.request_table import RequestTable
from scheduler.states import AttemptState


class GenerationPlanner:
    """The first part of a pass (S1, S3)."""

    __slots__ = ("_plan", "_table")

    def __init__(self, plan: IterationPass, table: RequestTable) -> None:
        """Made for one pass; reads the table and changes nothing in it."""
        self._plan = plan
        self._table = table

    def run(self) -> None:
        """Try every generation once.

        After the first refusal, requests that hold device pages still advance, but nobody resumes: room
        that appears now belongs to the one that was refused (B1, B15).
        """
        plan = self._plan
        for request in self._table.ordering.first_to_last(self._table.generations.values()):
            if plan.budget.requests == 0:
                break
            is_paused = request.state is AttemptState.GENERATION_PAUSED
            if plan.is_pushed_out(request) or (is_paused and plan.decisions.blocked_by is not None):
                continue
            num_rows = 1 + request.num_draft_tokens
            if plan.budget.has_seat(num_rows):
                self._seat(request, num_rows, is_paused=is_paused)

    def _seat(self, request: Request, num_rows: int, *, is_paused: bool) -> None:
        plan = self._plan
        answer = plan.try_with_victims(request, self._allocate, self._victims_for(request))
        if isinstance(answer, Grant):
            plan.budget.take_rows(num_rows)
            plan.decisions.generations.append(request)
            if is_paused:
                plan.decisions.resumed.append(request)
            return
        if answer.reason is RefusalReason.NEVER_FITS:
            plan.fail(request, answer)
            return
        plan.block(answer)
        if not is_paused:
            plan.push_out(request)
        elif answer.reason is RefusalReason.OVER_RESUME_WATERMARK and self._is_alone(request):
            # Nobody's end will lower the use of the device: only starting again from nothing can.
            plan.restart_suspended(request)

    def _allocate(self, request: Request) -> Grant | Refusal:
        answer = self._plan.manager.try_allocate_generation(request)
        if isinstance(answer, Grant):
            self._plan.budget.commit(answer)
        return answer

    def _victims_for(self, request: Request) -> Callable[[], list[Request]]:
        def victims() -> list[Request]:
            # A context never keeps what a running decode needs (S1), so started contexts go first.
            table, plan = self._table, self._plan
            contexts = reversed(table.ordering.first_to_last(table.contexts.values()))
            behind = table.ordering.victims_behind(request, table.generations.values())
            return [other for other in (*contexts, *behind) if plan.is_active(other) and not plan.is_pushed_out(other)]

        return victims

    def _is_alone(self, request: Request) -> bool:
        if self._table.has_pages_in_flight:
            return False
        return not any(self._plan.is_active(other) for other in self._table.admitted())
