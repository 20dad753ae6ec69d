"""Seats the running generations of a pass, oldest first, pushing out from the tail when pages are short."""

from collections.abc import Callable

from manager import Grant, Refusal, RefusalReason
from scheduler.iteration_pass import IterationPass
from scheduler.request import Request, WithDrafts
from scheduler.request_table import RequestTable
from scheduler.states import AttemptState


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
        decisions, budget = self._plan.decisions, self._plan.budget
        allocate = self._plan.manager.try_allocate_generation
        seated, pushed_out = decisions.generations, decisions.pushed_out
        line = self._in_line()
        for place, request in enumerate(line):
            if budget.requests <= 0 or budget.rows <= 0:
                break
            is_paused = request.state is AttemptState.GENERATION_PAUSED
            if (is_paused and decisions.blocked_by is not None) or request.request_id in pushed_out:
                continue
            if request.num_draft_tokens or is_paused:
                self._seat(request, self._num_drafts(request, len(line) - place - 1), is_paused=is_paused)
                continue
            # By far the most frequent case, kept short: a running decode without drafts gets its place.
            answer = allocate(request)
            if isinstance(answer, Refusal):
                self._seat(request, 0, is_paused=False)
                continue
            budget.commit(answer)
            budget.take_rows(1)
            seated[request.request_id] = (request, 0)

    def _in_line(self) -> list[Request]:
        line = self._table.generations_in_line()
        if self._fresh_first:
            # One known token beyond the prompt: its first decode step is yet to come.
            line = sorted(line, key=lambda request: len(request.token_ids) != request.prompt_length + 1)
        return line

    def _num_drafts(self, request: Request, num_behind: int) -> int:
        """Drafts get only rows that no decode behind needs for its own token."""
        budget = self._plan.budget
        behind = min(num_behind, budget.requests - 1)
        return max(0, min(request.num_draft_tokens, budget.rows - 1 - behind))

    def _seat(self, request: Request, num_drafts: int, *, is_paused: bool) -> None:
        plan = self._plan
        answer = plan.try_with_victims(request, self._allocation(num_drafts), lambda: self._victims(request))
        if isinstance(answer, int):
            plan.budget.take_rows(1 + answer)
            plan.decisions.generations[request.request_id] = (request, answer)
            if is_paused:
                plan.decisions.resumed.append(request)
            return
        assert answer is not None, "a decode always wants its next token"
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
            answer = self._allocate(request, num_drafts)
            if isinstance(answer, Refusal) and num_drafts:
                answer = self._allocate(request, 0)
                return answer if isinstance(answer, Refusal) else 0
            return answer if isinstance(answer, Refusal) else num_drafts

        return allocate

    def _allocate(self, request: Request, num_drafts: int) -> Grant | Refusal:
        is_wish = num_drafts == request.num_draft_tokens
        answer = self._plan.manager.try_allocate_generation(request if is_wish else WithDrafts(request, num_drafts))
        if isinstance(answer, Grant):
            self._plan.budget.commit(answer)
        return answer

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
