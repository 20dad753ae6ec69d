"""Everything the central scheduler remembers, in one place: requests, attempts, queues, ledger, outbox.

Rebuildable (C6): nothing here is the only copy. Moves a request between its containers as one thing, so
that it is in exactly one queue while it waits and has exactly one attempt while it runs. Decides nothing.
"""

from collections import Counter

from configs import CentralConfig, DispatchPolicy, RouterConfig, RoutingPolicy
from manager import WorkerName
from scheduler.arrival_queue import ArrivalQueue
from scheduler.introductions import HoldingKind
from scheduler.ledger import Holding, Ledger
from scheduler.messages import CancelAttempt, WorkerCommand, WorkerRole
from scheduler.offer_credit import OfferCredit
from scheduler.outbox import Outbox
from scheduler.prefix_index import PrefixIndex
from scheduler.router import WorkerLoad
from scheduler.spec import AttemptId, DoorName, RequestSpec, RequestUid, Term
from scheduler.states import RequestEvent, RequestState
from scheduler.tracked_request import Phase, TrackedRequest

COUNTER_NAMES = (
    "submitted",
    "resubmitted",
    "refused",
    "completed",
    "failed",
    "handed_back",
    "cancelled",
    "retries",
    "dispatches",
    "offers",
    "shared_contexts",
    "shared_transfers",
    "deferrals",
    "transfers",
    "ticket_bytes",
    "divergences",
    "audit_violations",
    "lost_workers",
    "lost_doors",
    "expired_requests",
    "refused_registrations",
    "stale_reports",
    "stale_heartbeats",
    "late_reports",
    "adopted",
    "orphans",
    "takeovers",
    "routed_cached_tokens",
    "routed_uncached_tokens",
    "routed_by_prefix",
    "local_prefills",
    "local_turns",
    "local_prefills_refused",
    *(f"routed_{policy}" for policy in RoutingPolicy),
)


class CentralBooks:
    """State of one term.

    Attributes:
        config: limits.
        router: how workers are chosen.
        term: this life of the central scheduler.
        ledger: what workers hold.
        outbox: what is to be sent.
        credit: offers that generation workers may be sent.
        prefixes: what workers have cached.
        fresh: queued since the last dispatch, oldest first; not yet asked whether a generation worker computes them.
        contexts: requests that wait for a context (or mixed) worker.
        offers: requests that wait for a generation worker.
        requests: every open request, oldest submission first.
        groups: of those, the choices of one prompt, by `RequestSpec.group`.
        attempts: of those, the running ones by attempt.
        counters: cumulative. submitted + resubmitted = completed + failed + handed_back + cancelled + open: what
            a door submits again (is_continuation) is no new request, and what it is asked to submit again
            (handed_back) has not failed.
        is_taking_over: nothing is dispatched yet (C6).
        took_over_at_s: when that ended; minus infinity where a term began with nobody to ask.
    """

    def __init__(self, config: CentralConfig, router: RouterConfig, term: Term) -> None:
        """Empty."""
        self.config = config
        self.router = router
        self.term = term
        self.ledger = Ledger()
        self.outbox = Outbox(term)
        self.credit = OfferCredit(config.max_offers_per_generation_worker, config.heartbeat_s)
        self.prefixes = PrefixIndex(router.max_index_blocks)
        self.fresh: list[TrackedRequest] = []
        self.contexts: ArrivalQueue[TrackedRequest] = ArrivalQueue()
        self.offers: ArrivalQueue[TrackedRequest] = ArrivalQueue()
        self.requests: dict[RequestUid, TrackedRequest] = {}
        self.groups: dict[str, list[TrackedRequest]] = {}
        self.attempts: dict[AttemptId, TrackedRequest] = {}
        self.counters: Counter[str] = Counter(dict.fromkeys(COUNTER_NAMES, 0))
        self.is_taking_over = False
        self.took_over_at_s = float("-inf")
        self._num_arrivals = 0
        self._num_attempts = 0

    @property
    def num_queued(self) -> int:
        """Open requests without an attempt."""
        return len(self.requests) - len(self.attempts)

    # -- requests ----------------------------------------------------------------------------------

    def admit(self, door: DoorName, spec: RequestSpec, now_s: float) -> None:
        """Queue a new request."""
        self._num_arrivals += 1
        # A priority is a head start and no more, so that nobody waits for ever.
        arrival = self._num_arrivals
        key = (arrival - self.config.arrivals_per_priority * spec.priority, arrival)
        request = TrackedRequest(spec, door, key, now_s, self.first_phase())
        self.requests[spec.uid] = request
        if spec.group:
            self.groups.setdefault(spec.group, []).append(request)
        self.counters["resubmitted" if spec.is_continuation else "submitted"] += 1
        self.enqueue(request)

    def first_phase(self) -> Phase:
        """Which side's resources are taken first (C2)."""
        is_generation_first = self.config.dispatch is DispatchPolicy.GENERATION_FIRST
        is_mixed = WorkerRole.MIXED in self.ledger.needed_roles()
        return Phase.WAITING_OFFER if is_generation_first and not is_mixed else Phase.WAITING_CONTEXT

    def enqueue(self, request: TrackedRequest) -> None:
        """Put a request that waits into the queue of its phase."""
        queue = self.contexts if request.phase is Phase.WAITING_CONTEXT else self.offers
        queue.add(request.key, request)
        if request.attempt_id is None:
            self.fresh.append(request)

    def dequeue(self, request: TrackedRequest) -> None:
        """Take a request out of whatever queue it is in."""
        self.contexts.discard(request.key)
        self.offers.discard(request.key)

    def ensure_attempt(self, request: TrackedRequest) -> AttemptId:
        """The running attempt of the request; begins one when it is queued."""
        if request.attempt_id is None:
            self._num_attempts += 1
            request.attempt_id = AttemptId(f"{self.term}.{self._num_attempts}")
            request.num_attempts += 1
            request.on_event(RequestEvent.DISPATCHED)
            self.attempts[request.attempt_id] = request
        return request.attempt_id

    def adopt(self, request: TrackedRequest, attempt_id: AttemptId, phase: Phase) -> None:
        """The request, out of every queue, goes on with an attempt of an earlier term."""
        request.adopt(attempt_id, phase)
        self.attempts[attempt_id] = request
        self.counters["adopted"] += 1

    def raise_term(self, term: Term) -> None:
        """Speak under a higher term. Nothing may have been sent under the present one."""
        self.term = term
        self.outbox.term = term

    def replan_queued(self) -> None:
        """The set of roles may have changed: every queued request waits for what it needs first now."""
        first = self.first_phase()
        for request in [*self.contexts, *self.offers]:
            if request.state is RequestState.QUEUED and request.phase is not first:
                self.dequeue(request)
                request.enter(first)
                self.enqueue(request)

    def requeue(self, request: TrackedRequest) -> None:
        """The attempt is lost; the request waits for a fresh one at its old place."""
        self._forget_attempt(request)
        self.dequeue(request)
        request.restart(self.first_phase())
        self.enqueue(request)

    def close(self, request: TrackedRequest, event: RequestEvent) -> None:
        """The one terminal event of a request: it is in no container afterwards (I2)."""
        request.on_event(event)
        self._forget_attempt(request)
        self.dequeue(request)
        del self.requests[request.spec.uid]
        group = self.groups.get(request.spec.group)
        if group is not None:
            group.remove(request)
            if not group:
                del self.groups[request.spec.group]

    def _forget_attempt(self, request: TrackedRequest) -> None:
        if request.attempt_id is not None:
            del self.attempts[request.attempt_id]

    # -- commands that change what a worker holds ----------------------------------------------------

    def give(
        self, load: WorkerLoad, request: TrackedRequest, kind: HoldingKind, command: WorkerCommand, now_s: float
    ) -> int:
        """Make the chosen worker hold a part of the attempt by a command; returns the number of its batch."""
        self.counters["dispatches"] += 1
        sequence = self.outbox.send(load.worker, command)
        self.hold(load, request, kind, sequence, now_s)
        return sequence

    def hold(self, load: WorkerLoad, request: TrackedRequest, kind: HoldingKind, sequence: int, now_s: float) -> None:
        """The worker holds a part of the attempt since the command of this number, which may have been another's."""
        num_tokens = request.total_tokens
        if kind is HoldingKind.CONTEXT:  # what it has to compute; pages are not what a context worker is short of
            num_tokens = request.context_tokens - load.num_cached_tokens
        worker = load.worker
        self.ledger.add(worker, self.ensure_attempt(request), Holding(kind, num_tokens, sequence, now_s))

    def cancel(self, worker: WorkerName, attempt_id: AttemptId, now_s: float) -> None:
        """Send a cancel; what is held counts until the worker says that it is gone."""
        if not self.ledger.is_live(worker):
            return
        sequence = self.outbox.send(worker, CancelAttempt(attempt_id))
        holding = self.ledger.holding(worker, attempt_id)
        if holding is not None:
            holding.is_ending = True
            holding.sequence = sequence
            holding.since_s = now_s
            holding.sightings = 0
