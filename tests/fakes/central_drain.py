"""Brings naive workers to rest: everything that can succeed does, leases that nobody renews expire."""

from collections.abc import Mapping

from manager import LeaseId
from scheduler.messages import RenewLeases
from scheduler.spec import AttemptId
from tests.fakes.central_workers import FakeTicket, ModelWorker


class LeaseClock:
    """When each lease of each life was last renewed."""

    def __init__(self, duration_s: float) -> None:
        """Leases live `duration_s` after their last renewal."""
        self._duration_s = duration_s
        self._renewed_at_s: dict[tuple[str, int, LeaseId], float] = {}
        self._num_read: dict[tuple[str, int], int] = {}

    def expire(self, worker: ModelWorker, now_s: float) -> None:
        """End the leases of a worker that were not renewed in time."""
        life = (worker.name, worker.epoch)
        for command in worker.received[self._num_read.get(life, 0) :]:
            if isinstance(command, RenewLeases):
                self._renewed_at_s.update({(*life, lease_id): now_s for lease_id in command.lease_ids})
        self._num_read[life] = len(worker.received)
        for attempt_id, ticket in list(worker.tickets.items()):
            if now_s - self._renewed_at_s.setdefault((*life, ticket.lease_id), now_s) > self._duration_s:
                worker.end_lease(attempt_id, settled=False)


def is_readable(ticket: FakeTicket, attempt_id: AttemptId, workers: Mapping[str, ModelWorker]) -> bool:
    """Whether the owner still holds the lease, in the life that gave it."""
    owner = workers.get(ticket.owner)
    return owner is not None and owner.epoch == ticket.epoch and owner.tickets.get(attempt_id) == ticket


def receive(reader: ModelWorker, attempt_id: AttemptId, workers: Mapping[str, ModelWorker]) -> None:
    """Read and settle; a lease that is gone fails the attempt (I6)."""
    handoff = reader.handoffs.get(attempt_id)
    if handoff is None:
        return  # generation first: the context is still being computed
    assert isinstance(handoff.ticket, FakeTicket)
    if is_readable(handoff.ticket, attempt_id, workers):
        ticket = reader.activate(attempt_id)
        workers[ticket.owner].end_lease(attempt_id, settled=True)
    else:
        reader.fail(attempt_id, retriable=True)


def advance_part(worker: ModelWorker, attempt_id: AttemptId, workers: Mapping[str, ModelWorker]) -> None:
    """The next good thing that can happen to a part."""
    match worker.parts[attempt_id]:
        case "context":
            worker.finish_context(attempt_id)
        case "offered":
            worker.reserve(attempt_id)
        case "reserved":
            receive(worker, attempt_id, workers)
        case "active" | "local":
            worker.finish(attempt_id)
        case _:
            pass  # a lease waits for its reader, or expires
