import pytest

from manager import RequestId
from scheduler.admission import TransferAdmission

A, B = RequestId("a"), RequestId("b")


def test_the_window_gives_until_it_is_full_and_a_refusal_takes_nothing() -> None:
    window = TransferAdmission(100)
    assert window.try_take(A, 60)
    assert not window.try_take(B, 41)
    assert (window.taken_bytes, window.available_bytes) == (60, 40)
    assert window.try_take(B, 40)


def test_a_released_transfer_gives_its_bytes_back_once() -> None:
    window = TransferAdmission(100)
    window.try_take(A, 60)
    window.release(A)
    window.release(A)
    assert window.taken_bytes == 0


def test_one_larger_than_the_window_goes_alone_when_nothing_moves() -> None:
    window = TransferAdmission(100)
    assert window.try_take(A, 10)
    assert not window.try_take(B, 500)
    window.release(A)
    assert window.try_take(B, 500)
    assert window.available_bytes == 0
    assert not window.try_take(A, 1)


def test_taking_twice_for_one_request_is_an_error() -> None:
    window = TransferAdmission(None)
    window.try_take(A, 1)
    with pytest.raises(ValueError, match="already has 1 bytes"):
        window.try_take(A, 1)


def test_a_window_without_limit_never_refuses() -> None:
    window = TransferAdmission(None)
    assert all(window.try_take(RequestId(str(i)), 1 << 40) for i in range(50))
