"""Gives the rows that are left to contexts, in chunks: first come first served, or equal progress.

Started contexts (between chunks, or paused for recompute) go before new ones, so that whoever holds pages
ends and lets go of them.
"""

from itertools import chain

from configs import SchedulerConfig
from configs.scheduling import ChunkingPolicy
from manager import Grant, PoolGroupId, Refusal, RefusalReason, RequestId
from scheduler.chunking import equal_progress_tokens, next_chunk_tokens
from scheduler.iteration_pass import IterationPass
from scheduler.output import ContextChunk
from scheduler.policy import PageReckoning
from scheduler.request import Request
from scheduler.request_table import RequestTable


class ContextPlanner:
    """The third part of a pass (S1, S7)."""

    __slots__ = ("_config", "_context_only", "_plan", "_reckoning", "_set_aside", "_table")

    def __init__(
        self,
        plan: IterationPass,
        table: RequestTable,
        reckoning: PageReckoning,
        config: SchedulerConfig,
        *,
        context_only: bool,
    ) -> None:
        """Made for one pass; of the table it changes nothing but the waiting line (`decisions.out_of_line`)."""
        self._plan = plan
        self._table = table
        self._reckoning = reckoning
        self._config = config
        self._context_only = context_only
        self._set_aside: dict[PoolGroupId, int] | None = None

    def run(self) -> None:
        """Chunks for started contexts, then for new ones up to the first that does not fit (S6)."""
        if self._config.chunking is ChunkingPolicy.EQUAL_PROGRESS:
            self._run_equal_progress()
            return
        for request in self._started_in_line():
            if not self._plan.budget.has_seat(1):
                return
            if self._may_go_on(request):
                self._try_chunk(request, self._rows_left())
        self._start_newcomers()

    def _start_newcomers(self) -> None:
        while (newcomer := self._next_newcomer()) is not None:
            if not self._start(newcomer, self._rows_left()):
                return

    def _run_equal_progress(self) -> None:
        """Share the rows in units, then let each try its share; what one leaves over goes to those behind.

        The shares are reckoned again before each attempt, since a claim of cached blocks or a refusal
        changes what there is to share.
        """
        plan = self._plan
        line = [(request, False) for request in self._started_in_line() if self._may_go_on(request)]
        most_newcomers = self._rows_left() // self._config.chunk_unit_tokens - len(line)
        while len(plan.decisions.out_of_line) < most_newcomers and (newcomer := self._next_newcomer()) is not None:
            line.append((newcomer, True))
        for place, (request, is_new) in enumerate(line):
            remaining = [self._remaining(other) for other, _ in line[place:]]
            share = equal_progress_tokens(remaining, self._rows_left(), self._config.chunk_unit_tokens)[0]
            if share == 0 or not plan.budget.has_seat(1):
                return
            if is_new and not self._is_open_to_newcomers():
                return
            if not is_new and not self._may_go_on(request):
                continue
            if not (self._start(request, share) if is_new else self._try_chunk(request, share)) and is_new:
                return
        self._start_newcomers()

    def _rows_left(self) -> int:
        """Rows of this step that contexts may still take."""
        rows, most = self._plan.budget.rows, self._config.max_context_tokens_beside_decodes
        if not most or next(iter(self._plan.decisions.decoding()), None) is None:
            return rows
        return min(rows, max(0, most - sum(chunk.num_tokens for chunk in self._plan.decisions.chunks)))

    # -- who may try ---------------------------------------------------------------------------------

    def _started_in_line(self) -> list[Request]:
        return self._table.ordering.first_to_last(self._table.contexts.values())

    def _may_go_on(self, request: Request) -> bool:
        """Behind a refused one only those go on that hold pages already.

        They are its victims next time, while whoever takes new pages now would take what it waits for (B1).
        """
        plan = self._plan
        if plan.is_pushed_out(request):
            return False
        return plan.decisions.blocked_by is None or plan.is_active(request)

    def _is_open_to_newcomers(self) -> bool:
        """Nobody new while somebody waits for pages, or has just lost them (B15)."""
        return self._plan.decisions.blocked_by is None and not self._plan.decisions.pushed_out

    def _next_newcomer(self) -> Request | None:
        """Take the first out of the waiting line, if it may be looked at in this pass."""
        decisions, table = self._plan.decisions, self._table
        if not self._is_open_to_newcomers() or not self._plan.budget.has_seat(1):
            return None
        # Looked at: started, or a duplicate that waits; so one pass looks at no more than a batch (S6).
        if table.num_admitted + len(decisions.reserved) + len(decisions.out_of_line) >= self._config.max_batch_size:
            return None
        newcomer = table.waiting.peek()
        if newcomer is None:
            return None
        holders = chain(table.admitted(), decisions.reserved, decisions.out_of_line, table.leased.values())
        if not self._reckoning.fits_worst_case(holders, newcomer, context_only=self._context_only):
            return None
        decisions.out_of_line.append(table.waiting.pop())
        return newcomer

    def _start(self, newcomer: Request, most_tokens: int) -> bool:
        """Whether the next newcomer may be looked at after this one."""
        decisions = self._plan.decisions
        if self._config.defer_duplicate_prefixes and self._waits_for_blocks(newcomer):
            decisions.num_duplicates += 1
            return True
        if self._try_chunk(newcomer, most_tokens):
            decisions.started.append(newcomer)
            return True
        return False

    def _waits_for_blocks(self, newcomer: Request) -> bool:
        """Whether a chunk of this very step computes the next block of a prefix that the newcomer shares.

        Then it finds that block in the cache if it waits one pass. It waits for a step that runs, so its
        waiting is bounded by the other's progress.
        """
        size = self._reckoning.tokens_per_block
        known = newcomer.token_ids
        for chunk in self._plan.decisions.chunks:
            end = (chunk.start // size + 1) * size
            # A claim never includes the last known token.
            if end > min(chunk.start + chunk.num_tokens, len(known) - 1):
                continue
            other = chunk.request.token_ids
            if other[end - 1] != known[end - 1] or not chunk.request.may_share_blocks_with(newcomer):
                continue
            if other[:end] == known[:end]:
                return True
        return False

    # -- one attempt ---------------------------------------------------------------------------------

    def _remaining(self, request: Request) -> int:
        manager = self._plan.manager
        done = manager.history_length(request.request_id) if manager.has_cache(request.request_id) else 0
        return len(request.token_ids) - done

    def _try_chunk(self, request: Request, most_tokens: int) -> bool:
        """Whether it has a chunk in this step now, or has left as failed."""
        plan = self._plan
        answer = plan.try_with_victims(
            request, lambda asking: self._chunk(asking, most_tokens), lambda: self._victims(request)
        )
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

    def _chunk(self, request: Request, most_tokens: int) -> ContextChunk | Refusal | None:
        """Claim or resume, size, grow, and leave room for running requests; all of it or nothing.

        None when no allowed chunk fits into the rows that are left.
        """
        plan = self._plan
        mark = plan.mark()
        claim = self._claim(request)
        if isinstance(claim, Refusal):
            return claim
        plan.budget.commit(claim)
        start = claim.history_length
        remaining = len(request.token_ids) - start
        num_tokens = next_chunk_tokens(remaining, most_tokens, self._config.chunk_unit_tokens)
        if num_tokens == 0:
            plan.return_to(mark)
            return None
        growth = plan.manager.resize_context(request, num_tokens)
        while _is_too_large(growth) and num_tokens > self._config.chunk_unit_tokens:
            # A window's pool holds less than a whole context: a shorter chunk may fit where this never does.
            num_tokens = next_chunk_tokens(remaining, num_tokens - 1, self._config.chunk_unit_tokens)
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

    def _claim(self, request: Request) -> Grant | Refusal:
        """What others have of it: the pages of a running choice of the same prompt, or a prefix in the cache."""
        manager, source = self._plan.manager, request.source
        if source is not None and not manager.has_cache(request.request_id):
            answer = manager.fork(source, request)
            if isinstance(answer, Grant):
                self._plan.decisions.forked.append(request)
                return answer
            if answer.reason is not RefusalReason.CANNOT_FORK:
                return answer
        return manager.prepare_context(request)

    def _growth_shortage(self, request_id: RequestId) -> Refusal | None:
        """Room for the decodes comes first (B5): a context that took it would be their victim at once."""
        if self._set_aside is None:
            # Who decodes, receives or is reserved is settled before the first context; reckoned once a pass.
            decisions = self._plan.decisions
            growing = chain(decisions.decoding(), self._table.receiving.values(), decisions.reserved)
            self._set_aside = self._reckoning.growth(growing)
        for group, pages in self._set_aside.items():
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


def _is_too_large(answer: Grant | Refusal) -> bool:
    return isinstance(answer, Refusal) and answer.reason is RefusalReason.NEVER_FITS
