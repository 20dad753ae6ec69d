"""Closes a step: moves the manager and the requests past it, or leaves both where they were.

Each call is one complete transaction. The manager goes first and may fail; requests, places in the table
and counts follow only after its commit, so that a failure leaves everything as it was (M1).
"""

from collections.abc import Mapping
from dataclasses import replace

from manager import KVCacheManager, PageLease, RequestId
from scheduler.errors import CallOutOfTurn
from scheduler.messages import WorkerRole
from scheduler.output import AbandonedStep, CompletedStep, ContextChunk, DrawnToken, SchedulerOutput
from scheduler.request import Request
from scheduler.request_table import RequestTable
from scheduler.states import AttemptEvent, AttemptState
from scheduler.transaction_scope import TransactionScope

_ENDINGS = frozenset({AttemptEvent.FINISHED, AttemptEvent.FINISHED_BY_FIRST_TOKEN})
_Drawing = tuple[Request, DrawnToken, AttemptEvent]


class StepCompletion:
    """Completes or abandons the steps of one worker."""

    __slots__ = ("_manager", "_max_step_retries", "_role", "_table")

    def __init__(
        self, manager: KVCacheManager, table: RequestTable, role: WorkerRole, *, max_step_retries: int
    ) -> None:
        """`max_step_retries`: failed steps in a row after which a request fails."""
        self._manager = manager
        self._table = table
        self._role = role
        self._max_step_retries = max_step_retries

    def complete(self, output: SchedulerOutput, drawn: Mapping[RequestId, DrawnToken], now_s: float) -> CompletedStep:
        """The step succeeded. Raises CallOutOfTurn, with nothing changed, when a drawn token is missing.

        Requests that were cancelled since the plan are passed over: they hold nothing any more.
        """
        chunks = [chunk for chunk in output.contexts if not chunk.request.is_terminal]
        generations = [request for request in output.generations if not request.is_terminal]
        drawing = self._drawing(output.iteration, chunks, generations, drawn)
        _check_accepted(output, drawn)
        # Blocks are committed under the tokens that a request knows, so accepted drafts are known first.
        drafted = [request for request in generations if drawn[request.request_id].accepted_token_ids]
        for request in drafted:
            for token_id in drawn[request.request_id].accepted_token_ids:
                request.append_token(token_id)
        try:
            leases = self._advance(chunks, generations, drawing, drawn)
        except BaseException:
            for request in drafted:
                request.take_back_tokens(len(drawn[request.request_id].accepted_token_ids))
            raise
        for chunk in chunks:
            chunk.request.failed_steps = 0
            if not chunk.is_last:
                chunk.request.on_event(AttemptEvent.CHUNK_DONE, now_s)
        return self._apply_drawn(drawing, leases, now_s)

    def _advance(
        self,
        chunks: list[ContextChunk],
        generations: list[Request],
        drawing: list[_Drawing],
        drawn: Mapping[RequestId, DrawnToken],
    ) -> dict[RequestId, PageLease]:
        """The manager's half of a completed step, in one transaction."""
        leases: dict[RequestId, PageLease] = {}
        advance = self._manager.advance
        with TransactionScope(self._manager.begin_complete()):
            for chunk in chunks:
                lag = drawn[chunk.request.request_id].draft_lag if chunk.is_last else 0
                advance(chunk.request, chunk.num_tokens, lag)
            for request in generations:
                token = drawn[request.request_id]
                advance(request, 1 + len(token.accepted_token_ids), token.draft_lag)
            for request, _, event in drawing:
                if event is AttemptEvent.CONTEXT_LEASED:
                    owner = request.source if request.source and self._table.is_following(request) else request
                    lease = self._manager.grant_lease(owner)
                    leases[request.request_id] = replace(lease, request_id=request.request_id)
            for request, _, event in drawing:
                if event is AttemptEvent.CONTEXT_LEASED or event in _ENDINGS:
                    self._manager.free_resources(request)
        return leases

    def abandon(self, output: SchedulerOutput, now_s: float) -> AbandonedStep:
        """The step failed: no history moves; its requests run again, or fail after too many failures (V22).

        What the plan gave stays theirs: the next plan asks for the same lengths and gets an empty grant,
        so that repeated failures do not add up.
        """
        members = [chunk.request for chunk in output.contexts] + list(output.generations)
        members = [request for request in members if not request.is_terminal]
        failed = [request for request in members if request.failed_steps >= self._max_step_retries]
        with TransactionScope(self._manager.begin_complete()):
            for request in failed:
                self._manager.free_resources(request)
        retried = []
        for request in members:
            request.failed_steps += 1
            if request in failed:
                request.on_event(AttemptEvent.FAIL, now_s)
                self._table.leave(request)
            else:
                retried.append(request)
        return AbandonedStep(retried=tuple(retried), failed=tuple(failed))

    def _drawing(
        self,
        iteration: int,
        chunks: list[ContextChunk],
        generations: list[Request],
        drawn: Mapping[RequestId, DrawnToken],
    ) -> list[_Drawing]:
        """Who draws a token, in batch order, and what that means for its state."""
        drawers = [drawer for chunk in chunks for drawer in self._table.drawers(chunk)] + generations
        missing = [request.request_id for request in drawers if request.request_id not in drawn]
        if missing:
            msg = f"iteration {iteration}: no token was drawn for {missing}"
            raise CallOutOfTurn(msg)
        drawing = []
        carried: set[RequestId] = set()  # contexts whose lease has its attempt
        for request in drawers:
            token = drawn[request.request_id]
            source = request.source
            if source is None or token.finish_reason is not None or not self._table.is_following(request):
                is_context = request.state is AttemptState.CONTEXT_INIT
                event = self._event(token, is_context=is_context)
                if event is AttemptEvent.CONTEXT_LEASED:
                    carried.add(request.request_id)
            elif self._role is not WorkerRole.CONTEXT:
                event = AttemptEvent.CHUNK_DONE
            elif source.request_id in carried:
                event = AttemptEvent.CONTEXT_SHARED
            else:  # those before it ended by their first tokens
                event = AttemptEvent.CONTEXT_LEASED
                carried.add(source.request_id)
            drawing.append((request, token, event))
        return drawing

    def _event(self, token: DrawnToken, *, is_context: bool) -> AttemptEvent:
        ended = token.finish_reason is not None
        if self._role is WorkerRole.CONTEXT:
            return AttemptEvent.FINISHED_BY_FIRST_TOKEN if ended else AttemptEvent.CONTEXT_LEASED
        if ended:
            return AttemptEvent.FINISHED
        return AttemptEvent.CONTEXT_DONE_HERE if is_context else AttemptEvent.TOKEN

    def _apply_drawn(
        self, drawing: list[_Drawing], leases: Mapping[RequestId, PageLease], now_s: float
    ) -> CompletedStep:
        table = self._table
        tokens, leased, shared, finished = [], [], [], []
        for request, _, _ in drawing:
            for follower in table.take_followers(request):
                follower.num_reused_tokens = request.num_reused_tokens
        for request, token, event in drawing:
            request.failed_steps = 0
            if token.accepted_token_ids:
                first = request.num_generated - len(token.accepted_token_ids)
                accepted = enumerate(token.accepted_token_ids)
                tokens += [(request, first + place, DrawnToken(token_id)) for place, token_id in accepted]
            tokens.append((request, request.append_token(token.token_id), token))
            request.on_event(event, now_s)
            if event in _ENDINGS:
                table.leave(request)
                finished.append(request)
            elif event is AttemptEvent.CONTEXT_LEASED:
                lease = leases[request.request_id]
                table.move_to_leased(request, lease.lease_id)
                leased.append((request, lease))
            elif event is AttemptEvent.CONTEXT_SHARED:
                table.leave(request)
                shared.append((request, leased[-1][0]))
            elif event is AttemptEvent.CONTEXT_DONE_HERE:
                table.move_to_generations(request)
            elif event is AttemptEvent.CHUNK_DONE:
                table.waiting.push(request)
        return CompletedStep(tokens=tuple(tokens), leases=tuple(leased), shared=tuple(shared), finished=tuple(finished))


def _check_accepted(output: SchedulerOutput, drawn: Mapping[RequestId, DrawnToken]) -> None:
    """No request accepts more drafts than the step had rows for. Raises CallOutOfTurn."""
    if not any(token.accepted_token_ids for token in drawn.values()):
        return
    lengths = dict.fromkeys(drawn, 0)
    pairs = zip(output.generations, output.draft_lengths or [0] * len(output.generations), strict=True)
    lengths.update((request.request_id, length) for request, length in pairs)
    for request_id, token in drawn.items():
        if len(token.accepted_token_ids) > lengths[request_id]:
            msg = (
                f"{request_id}: {len(token.accepted_token_ids)} drafts accepted, but the step had {lengths[request_id]}"
            )
            raise CallOutOfTurn(msg)
