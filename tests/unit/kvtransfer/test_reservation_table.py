"""Reservations end at their deadline, step or no step, exactly once."""

import pytest

from kvtransfer.errors import TransferLogicError
from kvtransfer.messages import ReservationExpired
from kvtransfer.reservation_table import ReservationTable
from manager import RequestId

A, B = RequestId("1.1"), RequestId("1.2")


def test_a_reservation_expires_once_at_its_deadline() -> None:
    table = ReservationTable(30.0)
    table.hold(A, 100.0)
    table.hold(B, 110.0)
    assert table.next_deadline_s == 130.0
    assert table.sweep(129.9) == ()
    assert table.sweep(130.0) == (ReservationExpired(A),)
    assert table.sweep(135.0) == ()
    assert table.num_held == 1
    assert table.counters()["reservations_expired"] == 1


def test_a_released_reservation_never_expires() -> None:
    table = ReservationTable(30.0)
    table.hold(A, 100.0)
    assert table.release(A)
    assert not table.release(A)
    assert table.sweep(1000.0) == ()


def test_a_renewal_gives_the_full_duration_again() -> None:
    table = ReservationTable(30.0)
    table.hold(A, 100.0)
    assert table.renew([A], 120.0) == 1
    assert table.sweep(149.9) == ()
    assert table.sweep(150.0) == (ReservationExpired(A),)


def test_a_renewal_with_an_old_reading_of_the_clock_does_not_shorten() -> None:
    table = ReservationTable(30.0)
    table.hold(A, 100.0)
    table.renew([A], 95.0)
    assert table.sweep(129.9) == ()


def test_a_late_renewal_is_counted_and_revives_nothing() -> None:
    table = ReservationTable(30.0)
    table.hold(A, 100.0)
    assert table.renew([A, B], 130.0) == 0
    assert table.counters()["late_reservations"] == 2
    assert table.renew([A], 129.0) == 0, "seen past its deadline, it stays past it"
    assert table.sweep(129.0) == (ReservationExpired(A),)


def test_a_second_hold_of_one_attempt_is_refused() -> None:
    table = ReservationTable(30.0)
    table.hold(A, 100.0)
    with pytest.raises(TransferLogicError, match=r"1\.1"):
        table.hold(A, 101.0)
    assert table.sweep(130.0) == (ReservationExpired(A),)
