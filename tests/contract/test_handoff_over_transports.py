"""Agents over network transports: verified, expired, cancelled and failed handoffs; real bytes, a clock by hand."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest

from kvtransfer.agent import TransferAgent
from kvtransfer.messages import ReceiveOutcome, ReceiveResult, TransferTicket
from kvtransfer.transports import nixl
from kvtransfer.transports.base import Transport
from kvtransfer.transports.collective import CollectiveTransport
from kvtransfer.transports.nixl import NixlTransport
from manager import Epoch, LeaseId, RequestId
from tests.fakes.transfer_peers import FakePeers
from tests.fakes.transfer_values import CONFIG, EPOCH, LAYOUT, OWNER, PAGE_BYTES, READER, lease, pages

NUM_SLOTS = 16
ATTEMPT = RequestId("attempt")
PATIENCE_S = 20.0


def pool(seed: int) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, NUM_SLOTS * PAGE_BYTES, dtype=np.uint8)


@dataclass
class World:
    """An owner and a reader; each is polled in turn, as their threads would."""

    owner: TransferAgent
    reader: TransferAgent
    source: npt.NDArray[np.uint8]
    destination: npt.NDArray[np.uint8]
    peers: FakePeers
    kill_owner: Callable[[], None]
    is_owner_dead: bool = False

    def give(self) -> TransferTicket:
        held = lease(slots=(2, 3))
        self.owner.hold(held, self.peers.now_s)
        return self.owner.make_ticket(held)

    def poll(self) -> None:
        if not self.is_owner_dead:
            self.owner.poll(self.peers.now_s)
        self.reader.poll(self.peers.now_s)

    def receive(self, ticket: TransferTicket) -> ReceiveOutcome:
        self.reader.start_receive(ATTEMPT, ticket, pages((5, 6)), self.peers.now_s)
        return self.outcome()

    def outcome(self) -> ReceiveOutcome:
        end_s = time.monotonic() + PATIENCE_S
        while time.monotonic() < end_s:
            self.poll()
            for outcome in self.reader.take_outcomes():
                assert isinstance(outcome, ReceiveOutcome)
                return outcome
            time.sleep(0.0005)
        pytest.fail("the receive does not end")

    def page(self, memory: npt.NDArray[np.uint8], slot: int) -> bytes:
        return memory[slot * PAGE_BYTES : (slot + 1) * PAGE_BYTES].tobytes()


def make_transport(kind: str, name: str) -> Transport:
    if kind == "nixl":
        return NixlTransport(name, PAGE_BYTES)
    return CollectiveTransport(name, max_batch_bytes=PAGE_BYTES, timeout_s=5.0)


@pytest.fixture(
    params=[
        "collective",
        pytest.param("nixl", marks=pytest.mark.skipif(bool(nixl.why_unavailable()), reason=nixl.why_unavailable())),
    ]
)
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    with ExitStack() as stack:
        owner_transport, reader_transport = (make_transport(request.param, name) for name in ("owner.1", "reader.1"))
        peers = FakePeers()
        owner = TransferAgent(owner_transport, peers, CONFIG, LAYOUT, OWNER, EPOCH)
        reader = TransferAgent(reader_transport, peers, CONFIG, LAYOUT, READER, EPOCH)
        source, destination = pool(1), pool(2)
        owner_transport.register(source)
        reader_transport.register(destination)
        peers.agents[OWNER] = owner
        stack.callback(reader.close)
        stack.callback(owner.close)
        world = World(owner, reader, source, destination, peers, owner.close)
        yield world


def test_a_settled_handoff_brings_the_pages_and_ends_the_lease(world: World) -> None:
    before = world.destination.copy()
    outcome = world.receive(world.give())
    assert (outcome.result, outcome.num_bytes) == (ReceiveResult.VERIFIED, 2 * PAGE_BYTES)
    assert world.page(world.destination, 5) == world.page(world.source, 2)
    assert world.page(world.destination, 6) == world.page(world.source, 3)
    others = [slot for slot in range(NUM_SLOTS) if slot not in (5, 6)]
    assert all(world.page(world.destination, slot) == world.page(before, slot) for slot in others)
    assert world.owner.num_leases == 0
    assert world.reader.counters()["bytes_received"] == 2 * PAGE_BYTES


def test_a_lease_that_ended_meanwhile_makes_the_bytes_worthless(world: World) -> None:
    ticket = world.give()
    world.owner.drop_lease(ticket.lease_id)
    outcome = world.receive(ticket)
    assert outcome.result is ReceiveResult.EXPIRED


def test_a_ticket_of_an_earlier_epoch_is_expired(world: World) -> None:
    ticket = world.give()
    old = lease(slots=(2, 3), lease_id=LeaseId(77), epoch=Epoch(EPOCH - 1))
    outcome = world.receive(TransferTicket(ticket.owner, old, ticket.layout, ticket.memory))
    assert outcome.result is ReceiveResult.EXPIRED


def test_a_cancelled_receive_writes_nothing_after_its_outcome(world: World) -> None:
    ticket = world.give()
    world.reader.start_receive(ATTEMPT, ticket, pages((5, 6)), world.peers.now_s)
    world.poll()
    world.reader.cancel_receive(ATTEMPT)
    assert world.outcome().result is ReceiveResult.CANCELLED
    world.destination[:] = 0
    for _ in range(20):
        world.poll()
        time.sleep(0.001)
    assert not world.destination.any()


def test_a_read_stops_one_heartbeat_before_the_lease_may_end(world: World) -> None:
    ticket = world.give()
    world.reader.start_receive(ATTEMPT, ticket, pages((5, 6)), world.peers.now_s)
    world.peers.now_s += CONFIG.lease_duration_s - CONFIG.heartbeat_s
    assert world.outcome().result is ReceiveResult.EXPIRED


def test_a_dead_owner_fails_the_receive_and_the_next_owner_is_read(world: World) -> None:
    ticket = world.give()
    assert world.receive(ticket).result is ReceiveResult.VERIFIED
    world.kill_owner()
    world.is_owner_dead = True
    outcome = world.receive(ticket)
    assert outcome.result is ReceiveResult.FAILED
    assert "gone" in outcome.message
