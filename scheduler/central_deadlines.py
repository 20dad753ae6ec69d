"""What time alone asks of requests: to end in time (I8), and to keep their leases alive (M7)."""

from manager import LeaseId, WorkerName
from scheduler.central_books import CentralBooks
from scheduler.central_endings import Endings, Fault
from scheduler.messages import ErrorKind, RenewLeases
from scheduler.tracked_request import Phase

_NOT_YET_TAKEN = frozenset({Phase.WAITING_OFFER, Phase.OFFERED})


def expire_requests(books: CentralBooks, endings: Endings, now_s: float) -> None:
    """Fail what has been open for too long."""
    deadline_s = books.config.request_deadline_s
    for request in list(books.requests.values()):
        open_s = now_s - request.submitted_at_s
        if open_s < deadline_s:
            return  # the others were submitted later
        message = f"request {request.spec.uid} was open for {open_s:.1f} s, the deadline is {deadline_s} s"
        books.counters["expired_requests"] += 1
        endings.fail(request, Fault(ErrorKind.DEADLINE, message, is_retriable=False), now_s)


def renew_leases(books: CentralBooks, renewed_at_s: float, now_s: float) -> float:
    """Once a heartbeat, while no generation worker has the request; returns when it was last done."""
    if now_s - renewed_at_s < books.config.heartbeat_s:
        return renewed_at_s
    by_owner: dict[WorkerName, list[LeaseId]] = {}
    for request in books.attempts.values():
        if request.is_lease_open and request.handoff is not None and request.phase in _NOT_YET_TAKEN:
            owner = request.context_worker
            if owner is not None:
                by_owner.setdefault(owner, []).append(request.handoff.ticket.lease_id)
    for owner, lease_ids in by_owner.items():
        books.outbox.send(owner, RenewLeases(tuple(lease_ids)))
    return now_s
