"""Gives waiting requests to workers, oldest first (C2, C3).

A younger request passes an older one only to a worker that is too small for the older one. No worker is
given more than its limit, and none without offer credit is offered anything, so an event costs no more
than the number of workers while nothing can be given.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from scheduler.arrival_queue import ArrivalQueue
from scheduler.central_books import CentralBooks
from scheduler.central_routing import CentralRouting
from scheduler.choice_groups import take_sharers
from scheduler.introductions import HoldingKind
from scheduler.ledger import WorkerRecord
from scheduler.messages import OfferGeneration, RunContext, RunLocal, WorkerRole
from scheduler.router import WorkerLoad
from scheduler.spec import Follower, RequestSpec
from scheduler.states import RequestState
from scheduler.tracked_request import Phase, TrackedRequest


class Dispatcher:
    """Moves requests out of the queues of the books."""

    def __init__(self, books: CentralBooks, routing: CentralRouting) -> None:
        """Choose workers by `routing`."""
        self._books = books
        self._routing = routing

    def dispatch(self, now_s: float) -> None:
        """Give away all that can be given now. Called after every event; may be called at any time."""
        if self._books.is_taking_over:
            return
        self._place_fresh(now_s)
        self._drain(self._books.offers, self._open_generation_workers, now_s)
        self._drain(self._books.contexts, self._open_context_workers, now_s)

    def _place_fresh(self, now_s: float) -> None:
        """Ask once of every queued request whether a generation worker computes it (C3).

        None passes an older one that waits for a place on a generation worker (C2).
        """
        fresh, self._books.fresh = self._books.fresh, []
        if not self._books.router.local_prefill_max_tokens:
            return
        for request in sorted(fresh, key=lambda request: request.key):
            first = next(iter(self._books.offers), request)
            if request.state is RequestState.QUEUED and first.key >= request.key:
                records = _untried(request, self._open_generation_workers())
                chosen = self._routing.choose_local(request, [record for record in records if _fits(request, record)])
                if chosen is not None:
                    self._books.dequeue(request)
                    self._start_local(request, chosen, now_s)

    def _drain(
        self,
        queue: ArrivalQueue[TrackedRequest],
        open_workers: Callable[[], Sequence[WorkerRecord]],
        now_s: float,
    ) -> None:
        candidates = open_workers() if len(queue) else ()
        if not candidates:
            return
        for request in queue:
            fitting = [record for record in candidates if _fits(request, record)]
            if not fitting:
                continue
            chosen = self._routing.choose(request, _untried(request, fitting) or fitting)
            queue.discard(request.key)
            if queue is self._books.offers:
                self._offer(request, chosen, now_s)
            else:
                self._start_context(request, chosen, now_s)
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

    def _start_context(self, request: TrackedRequest, chosen: WorkerLoad, now_s: float) -> None:
        record = self._books.ledger.record(chosen.worker)
        if record is not None and record.registration.role is WorkerRole.MIXED:
            self._start_local(request, chosen, now_s)
            return
        sharers, followers = take_sharers(self._books, request, chosen.worker, HoldingKind.CONTEXT)
        attempt_id = self._books.ensure_attempt(request)
        request.enter(Phase.CONTEXT)
        request.context_worker = chosen.worker
        has_reader = request.generation_worker is not None
        waited_s = now_s - request.waiting_since_s
        command = RunContext(attempt_id, request.spec, followers, has_reader=has_reader, waited_s=waited_s)
        sequence = self._books.give(chosen, request, HoldingKind.CONTEXT, command, now_s)
        for sharer in sharers:  # a shared prompt is computed once
            all_cached = replace(chosen, num_cached_tokens=sharer.context_tokens)
            self._books.hold(all_cached, sharer, HoldingKind.CONTEXT, sequence, now_s)

    def _start_local(self, request: TrackedRequest, chosen: WorkerLoad, now_s: float) -> None:
        sharers, followers = take_sharers(self._books, request, chosen.worker, HoldingKind.LOCAL)
        attempt_id = self._books.ensure_attempt(request)
        request.enter(Phase.LOCAL)
        request.generation_worker = chosen.worker
        command = RunLocal(attempt_id, request.spec, followers, waited_s=now_s - request.waiting_since_s)
        sequence = self._books.give(chosen, request, HoldingKind.LOCAL, command, now_s)
        for sharer in sharers:
            self._books.hold(chosen, sharer, HoldingKind.LOCAL, sequence, now_s)

    def _offer(self, request: TrackedRequest, chosen: WorkerLoad, now_s: float) -> None:
        attempt_id = self._books.ensure_attempt(request)
        request.enter(Phase.OFFERED)
        request.generation_worker = chosen.worker
        self._books.credit.spend(chosen.worker)
        self._books.counters["offers"] += 1
        followers = tuple(
            Follower(follower.attempt_id, _as_computed(follower), follower.handoff.first_token_id)
            for follower in request.followers
            if follower.attempt_id is not None and follower.handoff is not None
        )
        waited_s = now_s - request.waiting_since_s
        offer = OfferGeneration(attempt_id, _as_computed(request), request.handoff, followers, waited_s=waited_s)
        self._books.give(chosen, request, HoldingKind.OFFER, offer, now_s)


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


def _untried(request: TrackedRequest, records: Sequence[WorkerRecord]) -> list[WorkerRecord]:
    """Those on which no attempt of the request has failed."""
    return [record for record in records if record.worker not in request.failed_on]


def _fits(request: TrackedRequest, record: WorkerRecord) -> bool:
    is_context = record.registration.role is WorkerRole.CONTEXT
    needed = request.context_tokens if is_context else request.total_tokens
    return needed <= record.registration.max_request_tokens
