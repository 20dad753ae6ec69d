"""Transports that raise: one receive fails, nothing else does, and no page is let go while it is written."""

import pytest

from kvtransfer.messages import ReceiveResult
from kvtransfer.transports.inprocess import InProcessTransport
from manager import RequestId
from tests.fakes.transfer_transport import GatedTransport
from tests.fakes.transfer_values import lease
from tests.unit.kvtransfer.pair import ATTEMPT, AgentPair, make_pair


def gated(pair: AgentPair) -> GatedTransport:
    assert isinstance(pair.transport, GatedTransport)
    return pair.transport


def assert_next_receive_works(pair: AgentPair) -> None:
    later = RequestId("later")
    pair.start(pair.give(lease(lease_id=99)), slots=(8, 9), attempt=later)
    pair.poll()
    [outcome] = pair.received()
    assert (outcome.request_id, outcome.result) == (later, ReceiveResult.VERIFIED)


def test_a_read_that_cannot_start_fails_that_receive_only() -> None:
    pair = make_pair(is_gated=True)
    gated(pair).raise_in = {"read"}
    pair.start(pair.give(lease()))
    pair.poll()
    [outcome] = pair.received()
    assert (outcome.result, outcome.message) == (ReceiveResult.FAILED, "OSError: read is broken")
    gated(pair).raise_in = set()
    assert_next_receive_works(pair)


def test_a_read_reported_failed_ends_failed_with_the_transports_reason() -> None:
    pair = make_pair(is_gated=True)
    gated(pair).fail_next = "link down"
    pair.start(pair.give(lease()))
    pair.poll()
    [outcome] = pair.received()
    assert (outcome.result, outcome.message, outcome.num_bytes) == (ReceiveResult.FAILED, "link down", 0)
    assert_next_receive_works(pair)


def test_a_poll_that_raises_ends_the_receive_only_once_the_transport_says_that_it_stopped() -> None:
    pair = make_pair(is_gated=True)
    gated(pair).may_stop = False
    gated(pair).raise_in = {"poll"}
    pair.start(pair.give(lease()))
    pair.poll(3)
    assert pair.received() == []
    assert pair.reader.num_active == 1
    gated(pair).raise_in = set()
    pair.poll()
    assert pair.received() == []
    gated(pair).may_stop = True
    pair.poll()
    [outcome] = pair.received()
    assert (outcome.result, outcome.message) == (ReceiveResult.FAILED, "OSError: poll is broken")
    assert_next_receive_works(pair)


def test_a_cancel_that_raises_is_asked_again() -> None:
    pair = make_pair(is_gated=True)
    gated(pair).may_finish = False
    pair.start(pair.give(lease()))
    pair.poll()
    gated(pair).raise_in = {"cancel"}
    pair.reader.cancel_receive(ATTEMPT)
    pair.poll(2)
    assert pair.received() == []
    gated(pair).raise_in = set()
    pair.poll()
    assert [outcome.result for outcome in pair.received()] == [ReceiveResult.CANCELLED]


def test_a_poll_that_copies_and_raises_ends_the_receive_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes move inside its `poll` only, so after the exception nothing is being written."""
    pair = make_pair()
    assert isinstance(pair.transport, InProcessTransport)

    def broken_poll(read_id: int) -> None:
        msg = f"read {read_id} hit a bad page"
        raise OSError(msg)

    pair.start(pair.give(lease()))
    with monkeypatch.context() as patch:
        patch.setattr(pair.transport, "poll", broken_poll)
        pair.poll()
    [outcome] = pair.received()
    assert (outcome.result, outcome.message) == (ReceiveResult.FAILED, "OSError: read 1 hit a bad page")
    assert_next_receive_works(pair)


def test_an_owner_whose_memory_is_gone_fails_the_receive() -> None:
    pair = make_pair()
    ticket = pair.give(lease())
    pair.owner.close()
    pair.start(ticket)
    pair.poll()
    [outcome] = pair.received()
    assert outcome.result is ReceiveResult.FAILED
    assert "is gone" in outcome.message
