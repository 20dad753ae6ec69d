"""Gives waiting requests to workers, oldest first (C2, C3).

A younger request passes an older one only to a worker that is too small for the older one. No worker is
given more than its limit, and none without offer credit is offered anything, so an event costs no more
than the number of workers while nothing can be given.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from manager import WorkerName
from scheduler.arrival_queue import ArrivalQueue
from scheduler.central_books import CentralBooks
from scheduler.choice_groups import give_share, take_sharers
from scheduler.introductions import HoldingKind
from scheduler.ledger import WorkerRecord
from scheduler.messages import OfferGeneration, RunContext, RunLocal, WorkerRole
from scheduler.router import Router
from scheduler.spec import Follower, RequestSpec
from scheduler.tracked_request import Phase, TrackedRequest


class Dispatcher:
    """Moves requests out of the queues of the books."""

    def __init__(self, books: CentralBooks, context_router: Router, generation_router: Router) -> None:
        """Choose context and mixed workers by one router, generation workers by the other."""
        self._books = books
        self._context_router = context_router
        self._generation_router = generation_router

    def dispatch(self, now_s: float) -> None:
        """Give away all that can be given now. Called after every event; may be called at any time."""
        if self._books.is_taking_over:
            return
        self._drain(self._books.offers, self._open_generation_workers, self._generation_router, now_s)
        self._drain(self._books.contexts, self._open_context_workers, self._context_router, now_s)

    def _drain(
        self,
        queue: ArrivalQueue[TrackedRequest],
        open_workers: Callable[[], Sequence[WorkerRecord]],
        router: Router,
        now_s: float,
    ) -> None:
        candidates = open_workers() if len(queue) else ()
        if not candidates:
            return
        for request in queue:
            fitting = [record for record in candidates if _fits(request, record)]
            if not fitting:
                continue
            fresh = [record for record in fitting if record.worker not in request.failed_on] or fitting
            worker = router.choose(request.spec, [record.load for record in fresh])
            queue.discard(request.key)
            if queue is self._books.offers:
                self._offer(request, worker, now_s)
            else:
                self._start_context(request, worker, now_s)
            candidates = open_workers()
            if not candidates:
                return

    def _open_context_workers(self) -> list[WorkerRecord]:
        config = self._books.config
        limits = {
            WorkerRole.CONTEXT: config.max_running_per_context_worker,
            WorkerRole.MIXED: config.max_offers_per_generation_worker,
        }
        records = self._books.ledger.workers(*limits)
        return [record for record in records if record.num_attempts < limits[record.registration.role]]

    def _open_generation_workers(self) -> list[WorkerRecord]:
        limit = self._books.config.max_offers_per_generation_worker
        records = self._books.ledger.workers(WorkerRole.GENERATION)
        return [
            record for record in records if record.num_attempts < limit and self._books.credit.has_credit(record.worker)
        ]

    def _start_context(self, request: TrackedRequest, worker: WorkerName, now_s: float) -> None:
        books, spec = self._books, request.spec
        sharers = take_sharers(books, request)
        attempt_id = books.ensure_attempt(request)
        record = books.ledger.record(worker)
        is_mixed = record is not None and record.registration.role is WorkerRole.MIXED
        kind = HoldingKind.LOCAL if is_mixed else HoldingKind.CONTEXT
        followers = tuple([give_share(books, worker, sharer, kind) for sharer in sharers])
        if is_mixed:
            request.enter(Phase.LOCAL)
            request.generation_worker = worker
            sequence = books.give(worker, request, kind, RunLocal(attempt_id, spec, followers), now_s)
        else:
            request.enter(Phase.CONTEXT)
            request.context_worker = worker
            sequence = books.give(worker, request, kind, RunContext(attempt_id, spec, followers), now_s)
        for sharer in sharers:
            books.hold(worker, sharer, kind, sequence, now_s)

    def _offer(self, request: TrackedRequest, worker: WorkerName, now_s: float) -> None:
        attempt_id = self._books.ensure_attempt(request)
        request.enter(Phase.OFFERED)
        request.generation_worker = worker
        self._books.credit.spend(worker)
        self._books.counters["offers"] += 1
        followers = tuple(
            Follower(follower.attempt_id, _as_computed(follower), follower.handoff.first_token_id)
            for follower in request.followers
            if follower.attempt_id is not None and follower.handoff is not None
        )
        offer = OfferGeneration(attempt_id, _as_computed(request), request.handoff, followers)
        self._books.give(worker, request, HoldingKind.OFFER, offer, now_s)


def _as_computed(request: TrackedRequest) -> RequestSpec:
    """The spec that the context half had.

    A door that claims a request for a new term may have accepted its first token meanwhile. To the reader that
    token comes with the ticket: taken for prompt as well, a position would count whose KV nobody has computed.
    """
    spec, handoff = request.spec, request.handoff
    if handoff is None:
        return spec
    num_accepted = handoff.ticket.num_tokens - len(spec.prompt_token_ids)
    if num_accepted == len(spec.accepted_token_ids):
        return spec
    return replace(spec, accepted_token_ids=spec.accepted_token_ids[:num_accepted], is_continuation=num_accepted > 0)


def _fits(request: TrackedRequest, record: WorkerRecord) -> bool:
    is_context = record.registration.role is WorkerRole.CONTEXT
    needed = request.context_tokens if is_context else request.total_tokens
    return needed <= record.registration.max_request_tokens
