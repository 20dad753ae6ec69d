"""`LeaseRenewal`: keeps the pages of finished contexts held while no generation worker has their requests (M7)."""

from manager import LeaseId, WorkerName
from scheduler.central_books import CentralBooks
from scheduler.messages import RenewLeases
from scheduler.tracked_request import Phase

_NOT_YET_TAKEN = frozenset({Phase.WAITING_OFFER, Phase.OFFERED})


class LeaseRenewal:
    """One command per owner and heartbeat. Once a generation worker reads, it renews for itself."""

    def __init__(self, books: CentralBooks) -> None:
        """Renew as the books say."""
        self._books = books
        self._renewed_at_s = float("-inf")

    def renew_when_due(self, now_s: float) -> None:
        """Send the renewals when a heartbeat has passed since the last ones."""
        if now_s - self._renewed_at_s < self._books.config.heartbeat_s:
            return
        self._renewed_at_s = now_s
        by_owner: dict[WorkerName, list[LeaseId]] = {}
        for request in self._books.attempts.values():
            if request.is_lease_open and request.handoff is not None and request.phase in _NOT_YET_TAKEN:
                owner = request.context_worker
                if owner is not None:
                    by_owner.setdefault(owner, []).append(request.handoff.ticket.lease_id)
        for owner, lease_ids in by_owner.items():
            self._books.outbox.send(owner, RenewLeases(tuple(lease_ids)))
