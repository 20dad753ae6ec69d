"""The receiver's side of `TransferAgent`: good ends, bad ends, and that each ends once."""

import dataclasses

import pytest

from kvtransfer.errors import TransferLogicError
from kvtransfer.messages import LeaseOutcome, ReceiveResult
from manager import LeaseId, RequestId, WorkerName
from tests.fakes.transfer_transport import GatedTransport
from tests.fakes.transfer_values import CONFIG, LAYOUT, PAGE_BYTES, lease, page, pages
from tests.unit.kvtransfer.pair import ATTEMPT, AgentPair, make_pair


def gated(pair: AgentPair) -> GatedTransport:
    assert isinstance(pair.transport, GatedTransport)
    return pair.transport


def test_pages_arrive_verified_and_the_owner_learns_that_its_lease_is_settled() -> None:
    pair = make_pair()
    ticket = pair.give(lease(slots=(3, 9)))
    pair.start(ticket, slots=(5, 2))
    pair.advance(0.25)
    pair.poll()
    [outcome] = pair.received()
    assert outcome.request_id == ATTEMPT
    assert outcome.result is ReceiveResult.VERIFIED
    assert outcome.num_bytes == 2 * PAGE_BYTES
    assert outcome.duration_s == 0.25
    assert pair.destination_page(5) == pair.source_page(3)
    assert pair.destination_page(2) == pair.source_page(9)
    assert pair.lease_ends() == [LeaseOutcome(ticket.lease_id, ticket.lease.request_id, settled=True)]
    assert pair.reader.num_active == 0


def test_blocks_that_we_hold_already_are_not_read() -> None:
    pair = make_pair()
    ticket = pair.give(lease(slots=(3, 4, 8)))
    untouched = pair.destination.copy()
    pair.reader.start_receive(ATTEMPT, ticket, [page(2, 0)], pair.now_s)
    pair.poll()
    [outcome] = pair.received()
    assert (outcome.result, outcome.num_bytes) == (ReceiveResult.VERIFIED, PAGE_BYTES)
    assert pair.destination_page(0) == pair.source_page(8)
    assert (pair.destination[PAGE_BYTES:] == untouched[PAGE_BYTES:]).all()


def test_a_receive_of_nothing_still_settles_the_lease() -> None:
    pair = make_pair()
    pair.reader.start_receive(ATTEMPT, pair.give(lease()), [], pair.now_s)
    pair.poll()
    assert [outcome.result for outcome in pair.received()] == [ReceiveResult.VERIFIED]
    assert [outcome.settled for outcome in pair.lease_ends()] == [True]


def test_pages_read_from_a_lease_that_was_dropped_meanwhile_are_not_trusted() -> None:
    pair = make_pair(max_poll_bytes=PAGE_BYTES)
    ticket = pair.give(lease())
    pair.start(ticket)
    pair.poll()
    assert pair.owner.drop_lease(ticket.lease_id)
    pair.poll(2)
    assert [outcome.result for outcome in pair.received()] == [ReceiveResult.EXPIRED]
    assert pair.lease_ends() == []


def test_a_second_reader_of_a_settled_lease_is_told_expired() -> None:
    """Its ticket's pages may hold another request by the time that it reads them."""
    pair = make_pair()
    ticket = pair.give(lease())
    pair.start(ticket)
    pair.poll()
    pair.start(ticket, attempt=RequestId("next attempt"))
    pair.poll()
    assert [outcome.result for outcome in pair.received()] == [ReceiveResult.VERIFIED, ReceiveResult.EXPIRED]
    assert pair.owner.counters()["late_signals"] == 1


def test_reading_stops_one_heartbeat_before_the_lease_can_end() -> None:
    pair = make_pair(is_gated=True)
    gated(pair).may_finish = False
    pair.start(pair.give(lease()))
    pair.poll()
    pair.advance(CONFIG.lease_duration_s - CONFIG.heartbeat_s - 0.001)
    pair.poll()
    assert pair.reader.num_active == 1
    pair.advance(0.001)
    pair.poll()
    assert [outcome.result for outcome in pair.received()] == [ReceiveResult.EXPIRED]
    assert gated(pair).active == set()


def test_a_receive_that_begins_too_late_reads_nothing() -> None:
    pair = make_pair()
    before = pair.destination.copy()
    pair.start(pair.give(lease()))
    pair.advance(CONFIG.lease_duration_s)
    pair.poll()
    assert [outcome.result for outcome in pair.received()] == [ReceiveResult.EXPIRED]
    assert (pair.destination == before).all()


def test_a_cancelled_receive_ends_only_when_nothing_is_written_any_more() -> None:
    pair = make_pair(is_gated=True)
    gated(pair).may_finish = gated(pair).may_stop = False
    pair.start(pair.give(lease()))
    pair.poll()
    pair.reader.cancel_receive(ATTEMPT)
    pair.poll(3)
    assert pair.received() == []
    assert pair.reader.num_active == 1
    gated(pair).may_stop = True
    pair.poll()
    assert [outcome.result for outcome in pair.received()] == [ReceiveResult.CANCELLED]
    assert pair.reader.num_active == 0


def test_a_receive_cancelled_before_its_first_poll_reads_nothing() -> None:
    pair = make_pair()
    before = pair.destination.copy()
    pair.start(pair.give(lease()))
    pair.reader.cancel_receive(ATTEMPT)
    pair.poll()
    assert [outcome.result for outcome in pair.received()] == [ReceiveResult.CANCELLED]
    assert (pair.destination == before).all()


def test_a_cancel_while_the_answer_is_awaited_ends_at_once() -> None:
    pair = make_pair()
    pair.peers.holds_answers = True
    pair.start(pair.give(lease()))
    pair.poll()
    pair.reader.cancel_receive(ATTEMPT)
    pair.poll()
    pair.peers.replies[0].is_delivered = True
    pair.poll()
    assert [outcome.result for outcome in pair.received()] == [ReceiveResult.CANCELLED]


def test_cancelling_an_unknown_or_ended_receive_is_counted_and_ignored() -> None:
    pair = make_pair()
    pair.reader.cancel_receive(RequestId("never heard of"))
    pair.start(pair.give(lease()))
    pair.poll()
    pair.reader.cancel_receive(ATTEMPT)
    assert [outcome.result for outcome in pair.received()] == [ReceiveResult.VERIFIED]
    assert pair.reader.counters()["late_signals"] == 2


def test_an_owner_that_never_answers_fails_the_receive_at_the_lease_end() -> None:
    pair = make_pair()
    pair.peers.holds_answers = True
    pair.start(pair.give(lease()))
    pair.poll()
    pair.advance(CONFIG.lease_duration_s - 0.001)
    pair.poll()
    assert pair.received() == []
    pair.advance(0.001)
    pair.poll()
    [outcome] = pair.received()
    assert outcome.result is ReceiveResult.FAILED
    assert "did not answer" in outcome.message


def test_an_owner_that_dies_before_its_answer_fails_the_receive() -> None:
    pair = make_pair()
    pair.peers.holds_answers = True
    pair.start(pair.give(lease()))
    pair.poll()
    pair.peers.replies[0].is_lost = True
    pair.poll()
    [outcome] = pair.received()
    assert (outcome.result, outcome.message) == (ReceiveResult.FAILED, "PeerError: the owner is gone")


def test_an_owner_that_cannot_be_asked_fails_the_receive() -> None:
    pair = make_pair()
    ticket = dataclasses.replace(pair.give(lease()), owner=WorkerName("nobody"))
    pair.start(ticket)
    pair.poll()
    [outcome] = pair.received()
    assert outcome.result is ReceiveResult.FAILED
    assert "nobody cannot be reached" in outcome.message


def test_pools_that_do_not_fit_fail_the_receive_by_the_field_name() -> None:
    pair = make_pair(layout_of_reader=dataclasses.replace(LAYOUT, dtype="bfloat16"))
    before = pair.destination.copy()
    pair.start(pair.give(lease()))
    [outcome] = pair.received()
    assert outcome.result is ReceiveResult.FAILED
    assert "dtype is 'bfloat16' here and 'uint8' at the peer" in outcome.message
    assert pair.reader.num_active == 0
    assert (pair.destination == before).all()


def test_contradictory_destinations_are_a_bug_of_ours_and_change_nothing() -> None:
    pair = make_pair()
    ticket = pair.give(lease())
    with pytest.raises(TransferLogicError, match="2 destinations"):
        pair.reader.start_receive(ATTEMPT, ticket, [page(0, 4), page(1, 4)], pair.now_s)
    assert pair.reader.num_active == 0
    assert pair.received() == []
    assert pair.reader.counters()["receives_started"] == 0


def test_two_receives_of_one_attempt_at_once_are_a_bug_of_ours() -> None:
    pair = make_pair()
    ticket = pair.give(lease())
    pair.start(ticket)
    with pytest.raises(TransferLogicError, match=ATTEMPT):
        pair.start(ticket, slots=(8, 9))
    pair.poll()
    assert [outcome.result for outcome in pair.received()] == [ReceiveResult.VERIFIED]


def test_reads_are_done_in_order_of_arrival_one_piece_a_poll() -> None:
    pair = make_pair(max_poll_bytes=PAGE_BYTES)
    for number in range(2):
        held = lease(slots=(2 * number, 2 * number + 1), lease_id=number)
        destinations = pages((4 + 2 * number, 5 + 2 * number))
        pair.reader.start_receive(RequestId(f"attempt-{number}"), pair.give(held), destinations, pair.now_s)
    ended: list[list[str]] = []
    for _ in range(4):
        pair.poll()
        ended.append([outcome.request_id for outcome in pair.received()])
    assert ended == [[], ["attempt-0"], [], ["attempt-1"]]


def test_a_waiting_read_can_be_cancelled_while_another_copies() -> None:
    pair = make_pair(max_poll_bytes=PAGE_BYTES)
    pair.start(pair.give(lease(lease_id=1)), slots=(4, 5))
    second = RequestId("second")
    pair.start(pair.give(lease(lease_id=2)), slots=(6, 7), attempt=second)
    pair.poll()
    pair.reader.cancel_receive(second)
    pair.poll()
    results = {outcome.request_id: outcome.result for outcome in pair.received()}
    assert results == {ATTEMPT: ReceiveResult.VERIFIED, second: ReceiveResult.CANCELLED}


def test_counters_tell_every_kind_of_end() -> None:
    pair = make_pair()
    pair.start(pair.give(lease(lease_id=1)))
    pair.poll()
    pair.start(pair.give(lease(lease_id=2)))
    pair.owner.drop_lease(LeaseId(2))
    pair.poll()
    counters = pair.reader.counters()
    assert counters["receives_started"] == 2
    assert counters["receives_verified"] == counters["receives_expired"] == 1
    assert counters["bytes_received"] == 4 * PAGE_BYTES
    assert set(counters) == set(make_pair().reader.counters())
