"""How a request ends, and how an attempt is lost: every path releases everything, once (I1, I2).

A request ends by exactly one of complete, fail, cancel. A lost attempt is retried here while no token of
it can be at the door; afterwards only the door knows what was accepted, and is told to submit again (C9).
"""

from dataclasses import dataclass

from scheduler.central_books import CentralBooks
from scheduler.messages import DoorNotice, ErrorKind
from scheduler.states import RequestEvent
from scheduler.tracked_request import Phase, TrackedRequest

MAX_ATTEMPTS = 3
MAX_ATTEMPTS_ON_LOST_WORKERS = 8
"""Where workers die it is seldom the request that kills them; one that does must end all the same."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Why an attempt was lost."""

    kind: ErrorKind
    message: str
    is_retriable: bool


class Endings:
    """Ends requests and attempts of the books."""

    def __init__(self, books: CentralBooks) -> None:
        """Act on `books`."""
        self._books = books

    def complete(self, request: TrackedRequest, now_s: float) -> None:
        """Its last token was drawn; the door learns it from the token itself."""
        self._release(request, now_s)
        self._books.close(request, RequestEvent.FINISHED)
        self._books.counters["completed"] += 1

    def cancel(self, request: TrackedRequest, now_s: float) -> None:
        """Its door gave it up, or is gone: no notice."""
        self._release(request, now_s)
        self._books.close(request, RequestEvent.CANCEL)
        self._books.counters["cancelled"] += 1

    def fail(self, request: TrackedRequest, fault: Fault, now_s: float) -> None:
        """It ends here with a notice; a retriable one asks the door to submit it again."""
        self._release(request, now_s)
        self._books.close(request, RequestEvent.FAIL)
        self._books.counters["handed_back" if fault.is_retriable else "failed"] += 1
        notice = DoorNotice(request.spec.uid, fault.kind, fault.message, retriable=fault.is_retriable)
        self._books.outbox.notify(request.door, notice)

    def lose_attempt(self, request: TrackedRequest, fault: Fault, now_s: float) -> None:
        """Its attempt is gone: retry it here, or let the door go on, or fail."""
        is_lost_worker = fault.kind is ErrorKind.WORKER_LOST
        has_tries_left = request.num_attempts < (MAX_ATTEMPTS_ON_LOST_WORKERS if is_lost_worker else MAX_ATTEMPTS)
        if fault.is_retriable and has_tries_left and not request.has_emitted:
            self._release(request, now_s)
            self._books.requeue(request)
            request.waiting_since_s = now_s
            self._books.counters["retries"] += 1
            return
        is_for_door = fault.is_retriable and request.has_emitted
        self.fail(request, Fault(fault.kind, fault.message, is_for_door), now_s)

    def _release(self, request: TrackedRequest, now_s: float) -> None:
        """Cancel the attempt wherever a part of it is still held."""
        books, attempt_id = self._books, request.attempt_id
        self._leave_group(request, now_s)
        if attempt_id is None:
            return
        if request.context_worker is not None:
            holds_context = request.phase is Phase.CONTEXT and books.ledger.holding(request.context_worker, attempt_id)
            # By the request, not by the ledger: a worker need not list its leases.
            if holds_context or request.is_lease_open:
                books.cancel(request.context_worker, attempt_id, now_s)
        if request.generation_worker is not None and books.ledger.holding(request.generation_worker, attempt_id):
            books.cancel(request.generation_worker, attempt_id, now_s)

    def _leave_group(self, request: TrackedRequest, now_s: float) -> None:
        """A follower is dropped where its leader's offer is; without the leader each goes on alone, by its door."""
        leader, followers = request.leader, request.followers
        request.leader, request.followers = None, []
        if leader is not None:
            leader.followers.remove(request)
            if leader.generation_worker is not None and request.attempt_id is not None:
                self._books.cancel(leader.generation_worker, request.attempt_id, now_s)
        for follower in followers:
            follower.leader = None
            message = f"request {follower.spec.uid}: it shared the transfer of {request.spec.uid}, which has ended"
            self.lose_attempt(follower, Fault(ErrorKind.TRANSFER, message, is_retriable=True), now_s)
