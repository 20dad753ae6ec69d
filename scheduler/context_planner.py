"""Gives the rows that are left to contexts, in chunks: first come first served.

Started contexts (between chunks, or paused for recompute) go before new ones, so that whoever holds pages
ends and lets go of them.
"""

from enum import Enum, auto

from manager import Refusal, RefusalReason, RequestId
from scheduler.chunking import next_chunk_tokens
from scheduler.iteration_pass import IterationPass
from scheduler.output import ContextChunk
from scheduler.policy import PageReckoning
from scheduler.request import Request
from scheduler.request_table import RequestTable


class _NoRows(Enum):
    """No allowed chunk fits into the rows that are left."""

    NO_ROWS = auto()


class ContextPlanner:
    """The third part of a pass (S1, S7)."""

    __slots__ = ("_chunk_unit", "_context_only", "_max_requests", "_plan", "_reckoning", "_table")

    def __init__(
        self,
        plan: IterationPass,
        table: RequestTable,
        reckoning: PageReckoning,
        *,
        chunk_unit: int,
        max_requests: int,
        context_only: bool,
    ) -> None:
        """Made for one pass; of the table it changes nothing but the waiting line, see `decisions.started`."""
        self._plan = plan
        self._table = table
        self._reckoning = reckoning
        self._chunk_unit = chunk_unit
        self._max_requests = max_requests
        self._context_only = context_only

    def run(self) -> None:
        """Chunks for started contexts, then for new ones up to the first that does not fit (S6)."""
        plan = self._plan
        for request in self._table.ordering.first_to_last(self._table.contexts.values()):
            if not plan.budget.has_seat(1):
                return
            if plan.is_pushed_out(request):
                continue
            # Behind a refused one only those go on that hold pages already: they are its victims next
            # time, while whoever takes new pages now would take what it waits for (B1).
            if plan.decisions.blocked_by is None or plan.is_active(request):
                self._try_chunk(request)
        # Nobody new while somebody waits for pages, or has just lost them (B15).
        while plan.decisions.blocked_by is None and not plan.decisions.pushed_out and plan.budget.has_seat(1):
            newcomer = self._table.waiting.peek()
            if newcomer is None or not self._may_start(newcomer) or not self._try_chunk(newcomer):
                return
            plan.decisions.started.append(self._table.waiting.pop())

    def _may_start(self, newcomer: Request) -> bool:
        decisions, table = self._plan.decisions, self._table
        admitted = (*table.admitted(), *decisions.reserved, *decisions.started)
        if len(admitted) >= self._max_requests:
            return False
        holders = (*admitted, *table.leased.values())
        return self._reckoning.fits_worst_case(holders, newcomer, context_only=self._context_only)

    def _try_chunk(self, request: Request) -> bool:
        """Whether it has a chunk in this step now, or has left as failed."""
        plan = self._plan
        answer = plan.try_with_victims(request, self._chunk, lambda: self._victims(request))
        if isinstance(answer, ContextChunk):
            plan.budget.take_rows(answer.num_tokens)
            plan.decisions.chunks.append(answer)
            return True
        if isinstance(answer, Refusal):
            if answer.reason is RefusalReason.NEVER_FITS:
                plan.fail(request, answer)
                return True
            plan.block(answer)
        return False

    def _chunk(self, request: Request) -> ContextChunk | _NoRows | Refusal:
        """Claim or resume, size, grow, and leave room for running requests; all of it or nothing."""
        plan = self._plan
        mark = plan.mark()
        claim = plan.manager.prepare_context(request)
        if isinstance(claim, Refusal):
            return claim
        plan.budget.commit(claim)
        start = claim.history_length
        remaining = len(request.token_ids) - start
        num_tokens = next_chunk_tokens(remaining, plan.budget.rows, self._chunk_unit)
        if num_tokens == 0:
            plan.return_to(mark)
            return _NoRows.NO_ROWS
        growth = plan.manager.resize_context(request, num_tokens)
        if isinstance(growth, Refusal):
            plan.return_to(mark)
            return growth
        plan.budget.commit(growth)
        shortage = self._growth_shortage(request.request_id)
        if shortage is not None:
            plan.return_to(mark)
            return shortage
        if request.num_reused_tokens is None:
            plan.decisions.claims.append((request, claim.reused_tokens))
        return ContextChunk(request, start, num_tokens, is_last=num_tokens == remaining)

    def _growth_shortage(self, request_id: RequestId) -> Refusal | None:
        """Room for the decodes comes first (B5): a context that took it would be their victim at once."""
        decisions = self._plan.decisions
        growing = (*decisions.generations, *self._table.receiving.values(), *decisions.reserved)
        for group, pages in self._reckoning.growth(growing).items():
            available = self._plan.budget.pages[group]
            if pages > available:
                return Refusal(request_id, RefusalReason.OUT_OF_PAGES, pages, available, pool_group=group)
        return None

    def _victims(self, request: Request) -> list[Request]:
        """Started contexts behind it that hold pages and have no chunk in this step; never a generation."""
        seated = {chunk.request.request_id for chunk in self._plan.decisions.chunks}
        behind = self._table.ordering.victims_behind(request, self._table.contexts.values())
        return [
            other
            for other in behind
            if self._plan.is_active(other) and other.request_id not in seated and not self._plan.is_pushed_out(other)
        ]
