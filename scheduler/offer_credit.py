"""`OfferCredit`: how many offers a generation worker may be sent before it has answered.

A deferral takes all credit away, so that nothing is asked of a full worker again and again; reported
room gives one offer (the oldest, C2); every reservation earns two, so that a worker with room is soon
offered all it can take. A worker that says nothing for `retry_after_s` is asked once more: a lost
RoomReported must not stop a queue for ever.
"""

from dataclasses import dataclass

from manager import WorkerName


@dataclass(slots=True)
class _Credit:
    offers: int
    changed_at_s: float


class OfferCredit:
    """Credit of every live generation worker."""

    def __init__(self, limit: int, retry_after_s: float) -> None:
        """At most `limit` offers each; one more after `retry_after_s` of silence."""
        self._limit = limit
        self._retry_after_s = retry_after_s
        self._credits: dict[WorkerName, _Credit] = {}

    def open(self, worker: WorkerName, now_s: float) -> None:
        """A worker joined: full credit."""
        self._credits[worker] = _Credit(self._limit, now_s)

    def close(self, worker: WorkerName) -> None:
        """A worker is gone; it may be unknown."""
        self._credits.pop(worker, None)

    def has_credit(self, worker: WorkerName) -> bool:
        """Whether an offer may be sent now."""
        return self._credits[worker].offers > 0

    def spend(self, worker: WorkerName) -> None:
        """An offer was sent."""
        self._credits[worker].offers -= 1

    def on_deferred(self, worker: WorkerName, now_s: float) -> None:
        """An offer came back: nothing more until there is news."""
        self._credits[worker] = _Credit(0, now_s)

    def on_reserved(self, worker: WorkerName) -> None:
        """An offer was taken: there may be room for more."""
        self._add(worker, 2)

    def on_returned(self, worker: WorkerName) -> None:
        """An offer ended without saying anything of room (cancelled, failed)."""
        self._add(worker, 1)

    def on_room(self, worker: WorkerName) -> None:
        """Something was released: the oldest may be offered again."""
        credit = self._credits.get(worker)
        if credit is not None:
            credit.offers = max(credit.offers, 1)

    def is_retry_due(self, worker: WorkerName, now_s: float) -> bool:
        """Whether a worker without credit has been silent long enough to be asked again."""
        credit = self._credits[worker]
        return credit.offers <= 0 and now_s - credit.changed_at_s >= self._retry_after_s

    def retry(self, worker: WorkerName, now_s: float) -> None:
        """Allow one offer, and start to wait anew."""
        self._credits[worker] = _Credit(1, now_s)

    def _add(self, worker: WorkerName, offers: int) -> None:
        credit = self._credits.get(worker)
        if credit is not None:
            credit.offers = min(credit.offers + offers, self._limit)
