"""The table of leases that a worker has given."""

import math

import pytest

from kvtransfer.errors import TransferLogicError
from kvtransfer.lease_table import LeaseState, LeaseTable
from kvtransfer.messages import LeaseOutcome, ReaderId, SettleReply
from manager import Epoch, LeaseId, PageLease
from tests.fakes.transfer_values import EPOCH, lease

DURATION_S = 10.0
READER = ReaderId("reader")


@pytest.fixture
def table() -> LeaseTable:
    return LeaseTable(EPOCH, DURATION_S)


def settle(table: LeaseTable, held: PageLease, now_s: float, reader: ReaderId = READER) -> SettleReply:
    return table.settle(held.lease_id, held.epoch, reader, now_s)[0]


def test_a_live_lease_settles_ok_and_hands_its_pages_back_once(table: LeaseTable) -> None:
    held = lease()
    table.hold(held, 0.0)
    outcome = LeaseOutcome(held.lease_id, held.request_id, settled=True)
    assert table.settle(held.lease_id, EPOCH, READER, 9.9) == (SettleReply.OK, outcome)
    assert table.settle(held.lease_id, EPOCH, READER, 9.95) == (SettleReply.OK, None)
    assert table.num_held == 0


def test_a_repeated_settle_answers_ok_even_past_the_deadline_it_met(table: LeaseTable) -> None:
    held = lease()
    table.hold(held, 0.0)
    settle(table, held, 9.0)
    assert table.sweep(12.0) == ()
    assert settle(table, held, 12.0) is SettleReply.OK


def test_a_settled_lease_is_forgotten_in_the_end_and_then_answers_expired(table: LeaseTable) -> None:
    held = lease()
    table.hold(held, 0.0)
    settle(table, held, 9.0)
    assert table.sweep(19.0) == ()
    assert table.state(held.lease_id) is None
    assert settle(table, held, 19.0) is SettleReply.EXPIRED


def test_another_reader_of_a_settled_lease_is_told_expired(table: LeaseTable) -> None:
    held = lease()
    table.hold(held, 0.0)
    settle(table, held, 1.0)
    assert settle(table, held, 1.0, ReaderId("another")) is SettleReply.EXPIRED
    assert settle(table, held, 1.0) is SettleReply.OK


def test_at_its_deadline_a_lease_has_expired(table: LeaseTable) -> None:
    held = lease()
    table.hold(held, 1.0)
    assert table.sweep(10.999) == ()
    assert settle(table, held, 11.0) is SettleReply.EXPIRED
    assert table.sweep(11.0) == (LeaseOutcome(held.lease_id, held.request_id, settled=False),)
    assert table.sweep(12.0) == ()


def test_a_lease_once_seen_expired_stays_so_for_calls_with_an_older_clock_value(table: LeaseTable) -> None:
    held = lease()
    table.hold(held, 0.0)
    assert settle(table, held, 10.0) is SettleReply.EXPIRED
    assert table.state(held.lease_id) is LeaseState.EXPIRED
    assert table.renew([held.lease_id], 9.9) == 0
    assert settle(table, held, 9.9) is SettleReply.EXPIRED
    assert not table.drop(held.lease_id)
    assert [outcome.settled for outcome in table.sweep(9.9)] == [False]


def test_a_settle_of_another_epoch_or_an_unknown_lease_is_told_expired(table: LeaseTable) -> None:
    held = lease()
    table.hold(held, 0.0)
    assert table.settle(held.lease_id, Epoch(EPOCH - 1), READER, 1.0) == (SettleReply.EXPIRED, None)
    assert table.settle(LeaseId(404), EPOCH, READER, 1.0) == (SettleReply.EXPIRED, None)
    assert table.state(held.lease_id) is LeaseState.HELD
    assert table.counters()["late_settles"] == 2


def test_renewing_gives_the_full_duration_again_and_never_shortens(table: LeaseTable) -> None:
    held = lease()
    table.hold(held, 0.0)
    assert table.renew([held.lease_id], 8.0) == 1
    assert table.renew([held.lease_id], 7.0) == 1
    assert table.sweep(17.999) == ()
    assert len(table.sweep(18.0)) == 1


def test_renewing_an_ended_or_unknown_lease_is_counted_and_ignored(table: LeaseTable) -> None:
    settled, expired = lease(lease_id=1), lease(lease_id=2)
    table.hold(expired, 0.0)
    table.hold(settled, 5.0)
    settle(table, settled, 6.0)
    assert table.renew([settled.lease_id, expired.lease_id, LeaseId(404)], 10.0) == 0
    assert table.counters()["late_renewals"] == 3
    assert [outcome.lease_id for outcome in table.sweep(10.0)] == [expired.lease_id]


def test_a_dropped_lease_is_gone_without_an_outcome(table: LeaseTable) -> None:
    held = lease()
    table.hold(held, 0.0)
    assert table.drop(held.lease_id)
    assert not table.drop(held.lease_id)
    assert settle(table, held, 1.0) is SettleReply.EXPIRED
    assert table.sweep(20.0) == ()


def test_a_settled_lease_cannot_be_dropped(table: LeaseTable) -> None:
    held = lease()
    table.hold(held, 0.0)
    settle(table, held, 1.0)
    assert not table.drop(held.lease_id)
    assert settle(table, held, 1.0) is SettleReply.OK


def test_holding_twice_or_of_another_epoch_is_a_bug_of_ours(table: LeaseTable) -> None:
    table.hold(lease(), 0.0)
    with pytest.raises(TransferLogicError, match="held already"):
        table.hold(lease(), 1.0)
    with pytest.raises(TransferLogicError, match="epoch 8"):
        table.hold(lease(lease_id=2, epoch=Epoch(8)), 1.0)
    assert table.num_held == 1


def test_the_next_deadline_is_never_later_than_the_first_lease_to_expire(table: LeaseTable) -> None:
    assert table.next_deadline_s == math.inf
    table.hold(lease(lease_id=1), 4.0)
    table.hold(lease(lease_id=2), 2.0)
    assert table.next_deadline_s == 12.0
    table.sweep(12.0)
    assert table.next_deadline_s == 14.0
    table.sweep(14.0)
    assert table.next_deadline_s == math.inf
