"""Reads and settles in virtual time."""

from random import Random

import numpy as np
import pytest

from kvtransfer.errors import PeerError, TransferLogicError
from kvtransfer.messages import MemoryDescription, PageCopy, ReaderId, ReadStatus, SettleReply
from manager import Epoch, LeaseId, WorkerName
from serving.simulation.event_queue import EventQueue
from serving.simulation.network import VirtualNetwork, VirtualPeers, VirtualTransport
from serving.simulation.settings import FaultSettings, NetworkSettings

OWNER, READER = WorkerName("owner"), WorkerName("reader")
COPIES = [PageCopy(0, 0, 600), PageCopy(600, 1200, 400)]


def _world(faults: FaultSettings | None = None) -> tuple[VirtualNetwork, VirtualTransport, MemoryDescription]:
    network = VirtualNetwork(EventQueue(), NetworkSettings(message_s=1.0, transfer_latency_s=0.5, bytes_per_s=1000.0))
    used = FaultSettings() if faults is None else faults
    for name in (OWNER, READER):
        network.join(name, Epoch(1), lambda lease, epoch, by: SettleReply.OK)
    owner = VirtualTransport(network, OWNER, Epoch(1), used, Random(0))
    return network, VirtualTransport(network, READER, Epoch(1), used, Random(0)), owner.describe()


def test_a_read_lasts_as_long_as_its_bytes_and_those_before_it() -> None:
    network, reader, source = _world()
    first, second = reader.read(source, COPIES), reader.read(source, COPIES)
    network.events.run_until(1.49)
    assert reader.poll(first) is ReadStatus.PENDING
    network.events.run_until(1.5)
    assert reader.poll(first) is ReadStatus.DONE
    assert reader.poll(second) is ReadStatus.PENDING
    network.events.run_until(2.5)
    assert reader.poll(second) is ReadStatus.DONE
    with pytest.raises(TransferLogicError):
        reader.poll(first)


def test_a_cancelled_read_says_so_and_an_ended_one_is_left_alone() -> None:
    network, reader, source = _world()
    read = reader.read(source, COPIES)
    reader.cancel(read)
    network.events.run_until(10.0)
    assert reader.poll(read) is ReadStatus.CANCELLED
    reader.cancel(read)


def test_reading_from_a_dead_life_fails_even_when_a_new_one_has_begun() -> None:
    network, reader, source = _world()
    read = reader.read(source, COPIES)
    network.leave(OWNER, Epoch(1))
    network.join(OWNER, Epoch(2), lambda lease, epoch, by: SettleReply.OK)
    network.events.run_until(10.0)
    assert reader.poll(read) is ReadStatus.FAILED
    assert "died" in reader.error(read)
    with pytest.raises(PeerError):
        reader.read(source, COPIES)


def test_injected_failures_and_stalls_do_what_they_say() -> None:
    network, reader, source = _world(FaultSettings(transfer_failure_share=1.0))
    read = reader.read(source, COPIES)
    network.events.run_until(1.0)
    assert reader.poll(read) is ReadStatus.FAILED
    network, reader, source = _world(FaultSettings(transfer_stall_share=1.0, transfer_stall_s=7.0))
    read = reader.read(source, COPIES)
    network.events.run_until(8.4)
    assert reader.poll(read) is ReadStatus.PENDING
    network.events.run_until(8.5)
    assert reader.poll(read) is ReadStatus.DONE
    assert (reader.num_failed, reader.num_stalled) == (0, 1)


def test_a_transport_refuses_memory_and_foreign_descriptions() -> None:
    _, reader, _ = _world()
    with pytest.raises(TransferLogicError, match="no memory"):
        reader.register(np.zeros(8, dtype=np.uint8))
    with pytest.raises(PeerError, match="not a description"):
        reader.read(MemoryDescription("other"), COPIES)


def test_a_settle_is_answered_after_two_messages_by_the_life_that_is_there_then() -> None:
    network, _, _ = _world()
    answers: list[float] = []
    peers = VirtualPeers(network, lambda: answers.append(network.events.now_s))
    network.events.at(0.5, lambda: network.leave(OWNER, Epoch(1)))
    network.events.at(0.5, lambda: network.join(OWNER, Epoch(2), lambda lease, epoch, by: SettleReply.EXPIRED))
    reply = peers.settle(OWNER, LeaseId(1), Epoch(1), ReaderId("r"))
    assert reply.result() is None
    network.events.run_until(10.0)
    assert reply.result() is SettleReply.EXPIRED
    assert answers == [2.0]


def test_a_settle_with_nobody_there_is_lost() -> None:
    network, _, _ = _world()
    network.leave(OWNER, Epoch(1))
    reply = VirtualPeers(network, lambda: None).settle(OWNER, LeaseId(1), Epoch(1), ReaderId("r"))
    network.events.run_until(10.0)
    with pytest.raises(PeerError, match="gone"):
        reply.result()
