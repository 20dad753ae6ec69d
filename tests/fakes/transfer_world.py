"""`TransferWorld`: an owner and a reader over a lossy network, each with a clock of its own, and what is true.

The owner reuses pages at the very moment that it may (a lease was settled, expired or dropped): it overwrites
them. So a reader that trusts a page too late is found out by the bytes. The reader's free slots hold a
sentinel, so that a write into pages that it gave back is found out as well.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvtransfer.agent import TransferAgent
from kvtransfer.errors import PeerError
from kvtransfer.messages import LeaseOutcome, ReaderId, ReceiveOutcome, ReceiveResult, SettleReply, TransferTicket
from kvtransfer.transports.inprocess import InProcessRegistry, InProcessTransport
from manager import Epoch, LeaseId, PageLocation, RequestId, WorkerName
from tests.fakes.transfer_transport import GatedTransport
from tests.fakes.transfer_values import CONFIG, LAYOUT, OWNER, PAGE_BYTES, READER, lease, page

NUM_SLOTS = 8
SENTINEL = 0xEE


@dataclass
class Message:
    """One settle on its way: asked, perhaps answered, perhaps lost."""

    lease_id: LeaseId
    epoch: Epoch
    reader: ReaderId
    answer: SettleReply | None = None
    is_answer_here: bool = False
    is_lost: bool = False

    def result(self) -> SettleReply | None:
        """What the reader's agent sees."""
        if self.is_lost:
            msg = "no answer"
            raise PeerError(msg)
        return self.answer if self.is_answer_here else None


@dataclass
class GivenLease:
    """A ticket, what its pages held when it was given, and how it ended."""

    ticket: TransferTicket
    content: bytes
    slots: tuple[int, ...]
    ends: list[str] = field(default_factory=list)


@dataclass
class RunningReceive:
    """What one receive was started for."""

    given: GivenLease
    destinations: tuple[PageLocation, ...]
    result: ReceiveResult | None = None


class TransferWorld:
    """The state of the whole deployment; the property machine calls its verbs in any order."""

    def __init__(self, *, is_gated: bool) -> None:
        self.registry = InProcessRegistry()
        self.messages: list[Message] = []
        self.given: list[GivenLease] = []
        self.receives: dict[RequestId, RunningReceive] = {}
        self.owner_s, self.reader_s = 100.0, 5000.0
        self._generator = np.random.default_rng(3)
        self.epoch = Epoch(0)
        transport_class = GatedTransport if is_gated else InProcessTransport
        self.transport = transport_class(self.registry, READER, PAGE_BYTES)
        self.destination = np.full(NUM_SLOTS * PAGE_BYTES, SENTINEL, dtype=np.uint8)
        self.transport.register(self.destination)
        self.reader = TransferAgent(self.transport, self, CONFIG, LAYOUT, READER, Epoch(1))
        self.start_owner()

    # -- the owner -------------------------------------------------------------------------------------

    def start_owner(self) -> None:
        """A new life: new epoch, new memory under the same name; every lease of the old one is gone."""
        self.epoch = Epoch(self.epoch + 1)
        for given in self.given:
            if not given.ends:
                given.ends.append("died")
        self.owner_transport = InProcessTransport(self.registry, OWNER)
        self.source = self._random(NUM_SLOTS * PAGE_BYTES)
        self.owner_transport.register(self.source)
        self.owner = TransferAgent(self.owner_transport, self, CONFIG, LAYOUT, OWNER, self.epoch)

    def give(self, num_pages: int) -> GivenLease | None:
        """Compute a context and lease its pages; None when the pool is full."""
        free = [slot for slot in range(NUM_SLOTS) if slot not in set(self._leased_slots())]
        if len(free) < num_pages:
            return None
        slots = tuple(free[:num_pages])
        for slot in slots:
            self.source[slot * PAGE_BYTES :][:PAGE_BYTES] = self._random(PAGE_BYTES)
        # Counted anew in every life, so that only the epoch tells two lives' leases apart.
        num_of_this_life = sum(given.ticket.epoch == self.epoch for given in self.given)
        held = lease(slots, lease_id=num_of_this_life + 1, epoch=self.epoch)
        self.owner.hold(held, self.owner_s)
        content = b"".join(self.source[slot * PAGE_BYTES :][:PAGE_BYTES].tobytes() for slot in slots)
        self.given.append(GivenLease(self.owner.make_ticket(held), content, slots))
        return self.given[-1]

    def drop(self, given: GivenLease) -> None:
        """The request was cancelled."""
        if given.ticket.epoch == self.epoch and self.owner.drop_lease(given.ticket.lease_id):
            self._end(given, "dropped")

    def drain_owner(self) -> None:
        """The owner's loop: whoever's lease has ended loses its pages to the next request."""
        for outcome in self.owner.take_outcomes():
            assert isinstance(outcome, LeaseOutcome)
            key = (self.epoch, outcome.lease_id)
            [given] = [given for given in self.given if (given.ticket.epoch, given.ticket.lease_id) == key]
            self._end(given, "settled" if outcome.settled else "expired")

    def deliver_to_owner(self, message: Message, delay_s: float = 0.0) -> None:
        """The question arrives; perhaps not for the first time, perhaps in another life.

        `delay_s`: by how much the answering thread's reading of the clock is old.
        """
        answer = self.owner.settle(message.lease_id, message.epoch, message.reader, self.owner_s - delay_s)
        if message.answer is SettleReply.EXPIRED:
            assert answer is SettleReply.EXPIRED, f"lease {message.lease_id} came back to life"
        if message.answer is None:
            message.answer = answer

    # -- the reader ------------------------------------------------------------------------------------

    def settle(self, owner: WorkerName, lease_id: LeaseId, epoch: Epoch, reader: ReaderId) -> Message:
        """The reader's `PeerChannel`: the question is on its way."""
        assert owner == OWNER
        self.messages.append(Message(lease_id, epoch, reader))
        return self.messages[-1]

    def receive(self, given: GivenLease, num_skipped: int) -> bool:
        """Start a receive of all but the first `num_skipped` blocks; whether there was room."""
        used = {page.slot for receive in self._running() for page in receive.destinations}
        free = [slot for slot in range(NUM_SLOTS) if slot not in used]
        blocks = range(num_skipped, len(given.slots))
        if len(free) < len(blocks):
            return False
        destinations = tuple(page(block, slot) for block, slot in zip(blocks, free, strict=False))
        request_id = RequestId(f"attempt-{len(self.receives)}")
        self.receives[request_id] = RunningReceive(given, destinations)
        self.reader.start_receive(request_id, given.ticket, destinations, self.reader_s)
        return True

    def drain_reader(self) -> None:
        """The reader's loop: check what is verified, give the slots back."""
        for outcome in self.reader.take_outcomes():
            assert isinstance(outcome, ReceiveOutcome)
            receive = self.receives[outcome.request_id]
            assert receive.result is None, f"{outcome.request_id} ended twice"
            receive.result = outcome.result
            if outcome.result is ReceiveResult.VERIFIED:
                self._check_verified(receive)
            for destination in receive.destinations:
                self.destination[destination.slot * PAGE_BYTES :][:PAGE_BYTES] = SENTINEL
        # The worst moment for a wire that still writes: the pages have just been given back.
        if isinstance(self.transport, GatedTransport):
            self.transport.move()

    # -- truth -----------------------------------------------------------------------------------------

    def check(self) -> None:
        """What holds at every moment."""
        used = {page.slot for receive in self._running() for page in receive.destinations}
        for slot in set(range(NUM_SLOTS)) - used:
            content = self.destination[slot * PAGE_BYTES :][:PAGE_BYTES]
            assert (content == SENTINEL).all(), f"slot {slot} was written after it was given back"
        for given in self.given:
            assert len(given.ends) <= 1, f"lease {given.ticket.lease_id} ended as {given.ends}"
            verified = [receive for receive in self.receives.values() if receive.given is given]
            assert sum(receive.result is ReceiveResult.VERIFIED for receive in verified) <= 1

    def _check_verified(self, receive: RunningReceive) -> None:
        for destination in receive.destinations:
            expected = receive.given.content[destination.block * PAGE_BYTES :][:PAGE_BYTES]
            actual = self.destination[destination.slot * PAGE_BYTES :][:PAGE_BYTES].tobytes()
            assert actual == expected, (
                f"block {destination.block} of {receive.given.ticket.lease_id} is not what it was"
            )

    def _running(self) -> Iterator[RunningReceive]:
        return (receive for receive in self.receives.values() if receive.result is None)

    def _leased_slots(self) -> Iterator[int]:
        return (slot for given in self.given if not given.ends for slot in given.slots)

    def _end(self, given: GivenLease, how: str) -> None:
        given.ends.append(how)
        if given.ticket.epoch == self.epoch:
            for slot in given.slots:
                self.source[slot * PAGE_BYTES :][:PAGE_BYTES] = self._random(PAGE_BYTES)

    def _random(self, num_bytes: int) -> npt.NDArray[np.uint8]:
        return self._generator.integers(0, 256, num_bytes, dtype=np.uint8)
