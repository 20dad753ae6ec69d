"""Two agents with pools of their own, a registry and a clock between them."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvtransfer.agent import TransferAgent
from kvtransfer.messages import LeaseOutcome, PoolLayout, ReceiveOutcome, TransferTicket
from kvtransfer.transports.base import Transport
from kvtransfer.transports.inprocess import InProcessRegistry, InProcessTransport
from manager import PageLease, PageLocation, RequestId
from tests.fakes.transfer_peers import FakePeers
from tests.fakes.transfer_transport import GatedTransport
from tests.fakes.transfer_values import CONFIG, EPOCH, LAYOUT, OWNER, PAGE_BYTES, READER, pages

NUM_SLOTS = 16
ATTEMPT = RequestId("generation-attempt")


@dataclass
class AgentPair:
    """An owner that gives leases and a reader that receives; `now_s` is the clock of both."""

    transport: InProcessTransport | GatedTransport
    owner: TransferAgent
    reader: TransferAgent
    source: npt.NDArray[np.uint8]
    destination: npt.NDArray[np.uint8]
    peers: FakePeers
    wakes: list[str] = field(default_factory=list)

    @property
    def now_s(self) -> float:
        return self.peers.now_s

    def advance(self, seconds: float) -> None:
        self.peers.now_s += seconds

    def give(self, lease: PageLease) -> TransferTicket:
        """Hold a lease at the owner and hand out its ticket."""
        self.owner.hold(lease, self.now_s)
        return self.owner.make_ticket(lease)

    def start(
        self, ticket: TransferTicket, slots: tuple[int, ...] = (5, 6), attempt: RequestId = ATTEMPT
    ) -> tuple[PageLocation, ...]:
        """Receive the ticket's first blocks into these slots."""
        destinations = pages(slots)
        self.reader.start_receive(attempt, ticket, destinations, self.now_s)
        return destinations

    def poll(self, times: int = 1) -> float:
        """Poll the reader; its last answer."""
        delay_s = 0.0
        for _ in range(times):
            delay_s = self.reader.poll(self.now_s)
        return delay_s

    def received(self) -> list[ReceiveOutcome]:
        """What the reader's loop would drain."""
        outcomes = self.reader.take_outcomes()
        return [outcome for outcome in outcomes if isinstance(outcome, ReceiveOutcome)]

    def lease_ends(self) -> list[LeaseOutcome]:
        """What the owner's loop would drain."""
        return [outcome for outcome in self.owner.take_outcomes() if isinstance(outcome, LeaseOutcome)]

    def source_page(self, slot: int) -> bytes:
        return self.source[slot * PAGE_BYTES : (slot + 1) * PAGE_BYTES].tobytes()

    def destination_page(self, slot: int) -> bytes:
        return self.destination[slot * PAGE_BYTES : (slot + 1) * PAGE_BYTES].tobytes()


def _pool(transport: Transport, seed: int) -> npt.NDArray[np.uint8]:
    memory = np.random.default_rng(seed).integers(0, 256, NUM_SLOTS * PAGE_BYTES, dtype=np.uint8)
    transport.register(memory)
    return memory


def make_pair(
    *, is_gated: bool = False, layout_of_reader: PoolLayout = LAYOUT, max_poll_bytes: int = 1024
) -> AgentPair:
    """Both agents share one registry; `is_gated` lets the test hold back the reader's bytes."""
    registry = InProcessRegistry()
    owner_transport = InProcessTransport(registry, OWNER)
    reader_transport = (GatedTransport if is_gated else InProcessTransport)(registry, READER, max_poll_bytes)
    peers = FakePeers()
    wakes: list[str] = []
    owner = TransferAgent(owner_transport, peers, CONFIG, LAYOUT, OWNER, EPOCH, wake=lambda: wakes.append("owner"))
    reader = TransferAgent(
        reader_transport, peers, CONFIG, layout_of_reader, READER, EPOCH, wake=lambda: wakes.append("reader")
    )
    peers.agents[OWNER] = owner
    return AgentPair(
        reader_transport, owner, reader, _pool(owner_transport, 1), _pool(reader_transport, 2), peers, wakes
    )
