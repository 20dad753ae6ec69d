"""The owner's side of `TransferAgent`, its sleep, its bell and its threads."""

import dataclasses
import threading
import time

import pytest

from kvtransfer.errors import TransferLogicError
from kvtransfer.messages import LeaseOutcome, ReaderId, ReceiveResult, SettleReply
from manager import Epoch, LeaseId
from tests.fakes.transfer_transport import GatedTransport
from tests.fakes.transfer_values import CONFIG, EPOCH, PAGE_BYTES, lease
from tests.unit.kvtransfer.pair import ATTEMPT, make_pair

SOMEONE = ReaderId("someone")


def test_an_expired_lease_is_reported_once_and_its_late_reader_is_refused() -> None:
    pair = make_pair()
    ticket = pair.give(lease())
    pair.owner.poll(CONFIG.lease_duration_s)
    pair.owner.poll(CONFIG.lease_duration_s + 1)
    assert pair.lease_ends() == [LeaseOutcome(ticket.lease_id, ticket.lease.request_id, settled=False)]
    reply = pair.owner.settle(ticket.lease_id, ticket.epoch, SOMEONE, CONFIG.lease_duration_s + 1)
    assert reply is SettleReply.EXPIRED
    assert pair.owner.num_leases == 0
    assert pair.owner.counters()["late_signals"] == 1


def test_one_attempt_that_is_received_twice_is_two_readers_and_the_second_is_refused() -> None:
    # A new term may offer an attempt again whose first receive settled the lease: the pages are another's by then.
    pair = make_pair()
    ticket = pair.give(lease())
    pair.start(ticket, (5, 6))
    pair.poll(3)
    (outcome,) = pair.lease_ends()
    assert outcome.settled
    pair.source[:] = 0  # the owner reuses them at once
    pair.start(ticket, (7, 8))
    pair.poll(3)
    results = [received.result for received in pair.received()]
    assert results == [ReceiveResult.VERIFIED, ReceiveResult.EXPIRED]


def test_a_renewed_lease_outlives_its_first_deadline() -> None:
    pair = make_pair()
    ticket = pair.give(lease())
    assert pair.owner.renew([ticket.lease_id, LeaseId(404)], 9.0) == 1
    pair.owner.poll(CONFIG.lease_duration_s)
    assert pair.lease_ends() == []
    assert pair.owner.num_leases == 1
    counters = pair.owner.counters()
    assert (counters["leases_renewed"], counters["late_signals"]) == (1, 1)


def test_a_dropped_lease_gives_no_outcome_and_cannot_be_dropped_twice() -> None:
    pair = make_pair()
    ticket = pair.give(lease())
    assert pair.owner.drop_lease(ticket.lease_id)
    assert not pair.owner.drop_lease(ticket.lease_id)
    pair.owner.poll(CONFIG.lease_duration_s)
    assert pair.lease_ends() == []


def test_a_ticket_for_a_lease_of_another_epoch_is_a_bug_of_ours() -> None:
    pair = make_pair()
    foreign = lease(epoch=Epoch(EPOCH + 1))
    with pytest.raises(TransferLogicError, match="epoch"):
        pair.owner.make_ticket(foreign)
    with pytest.raises(TransferLogicError, match="epoch"):
        pair.owner.hold(foreign, 0.0)


def test_a_ticket_names_the_owner_the_memory_and_the_bytes() -> None:
    pair = make_pair()
    ticket = pair.give(lease(slots=(1, 2, 3)))
    assert ticket.total_bytes == 3 * PAGE_BYTES
    assert ticket.memory == pair.owner.make_ticket(ticket.lease).memory
    assert dataclasses.replace(ticket) == ticket


def test_the_loop_is_woken_for_every_outcome() -> None:
    pair = make_pair()
    pair.start(pair.give(lease(lease_id=1)))
    assert pair.wakes == []
    had_outcomes = pair.reader.has_outcomes
    pair.poll()
    assert sorted(pair.wakes) == ["owner", "reader"]
    assert (had_outcomes, pair.reader.has_outcomes) == (False, True)
    pair.give(lease(lease_id=2))
    pair.owner.poll(CONFIG.lease_duration_s)
    assert pair.wakes.count("owner") == 2


def test_an_idle_agent_sleeps_until_the_next_deadline_and_a_heartbeat_at_most() -> None:
    pair = make_pair()
    assert pair.poll() == CONFIG.heartbeat_s
    pair.give(lease())
    assert pair.owner.poll(9.75) == 0.25
    assert pair.owner.poll(1.0) == CONFIG.heartbeat_s


def test_an_agent_that_copies_wants_no_sleep_and_one_that_waits_a_short_one() -> None:
    copying = make_pair(max_poll_bytes=32)
    copying.start(copying.give(lease()))
    assert copying.poll() == 0.0
    waiting = make_pair(is_gated=True)
    assert isinstance(waiting.transport, GatedTransport)
    waiting.transport.may_finish = False
    waiting.start(waiting.give(lease()))
    assert waiting.poll() == CONFIG.agent_poll_s
    asking = make_pair()
    asking.peers.holds_answers = True
    asking.start(asking.give(lease()))
    assert asking.poll() == CONFIG.agent_poll_s


def test_starting_a_receive_ends_the_agents_sleep() -> None:
    pair = make_pair()
    threading.Timer(0.02, lambda: pair.start(pair.give(lease()))).start()
    started = time.monotonic()
    pair.reader.wait_for_work(20.0)
    assert time.monotonic() - started < 10.0
    assert pair.reader.num_active == 1


def test_a_settle_is_answered_while_the_transport_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = make_pair()
    pair.start(pair.give(lease(lease_id=1)))
    held = lease(lease_id=2)
    pair.reader.hold(held, 0.0)
    is_reading, may_go_on = threading.Event(), threading.Event()
    inner_poll = pair.transport.poll

    def slow_poll(read_id: int) -> object:
        is_reading.set()
        assert may_go_on.wait(20.0)
        return inner_poll(read_id)  # type: ignore[arg-type]

    monkeypatch.setattr(pair.transport, "poll", slow_poll)
    thread = threading.Thread(target=pair.poll)
    thread.start()
    assert is_reading.wait(20.0)
    assert pair.reader.settle(held.lease_id, held.epoch, SOMEONE, 0.0) is SettleReply.OK
    may_go_on.set()
    thread.join(20.0)
    assert [outcome.result for outcome in pair.received()] == [ReceiveResult.VERIFIED]


def test_a_closed_agent_answers_expired_and_starts_nothing() -> None:
    pair = make_pair()
    ticket = pair.give(lease())
    pair.owner.close()
    pair.owner.close()
    assert pair.owner.settle(ticket.lease_id, ticket.epoch, SOMEONE, 0.0) is SettleReply.EXPIRED
    with pytest.raises(TransferLogicError, match="closed"):
        pair.owner.start_receive(ATTEMPT, ticket, [], 0.0)
