"""What a context worker hands over, unread by the scheduler: a ticket, and tickets of contexts that go on."""

from dataclasses import dataclass
from typing import Protocol

from manager import Epoch, LeaseId, WorkerName
from scheduler.spec import AttemptId


class Ticket(Protocol):
    """What a context worker hands over; the scheduler carries it unread. `kvtransfer` has the real one."""

    @property
    def owner(self) -> WorkerName:
        """The worker whose pages they are."""
        ...

    @property
    def epoch(self) -> Epoch:
        """Its life when it gave the lease."""
        ...

    @property
    def lease_id(self) -> LeaseId:
        """The hold on the pages."""
        ...

    @property
    def num_tokens(self) -> int:
        """Positions whose KV the pages contain."""
        ...

    @property
    def total_bytes(self) -> int:
        """Bytes of all pages."""
        ...


@dataclass(frozen=True, slots=True)
class ContextPart:
    """Full blocks of a context that goes on; for the reader that has a place for them."""

    attempt_id: AttemptId
    ticket: Ticket


@dataclass(frozen=True, slots=True)
class DeliverPart:
    """Full blocks of a context that is still computed, for the reservation that waits for it. May be ignored."""

    attempt_id: AttemptId
    ticket: Ticket
