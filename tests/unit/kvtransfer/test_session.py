"""One receive without any I/O: what it asks for, and when it ends."""

import pytest

from kvtransfer.errors import TransferLogicError
from kvtransfer.messages import ReaderId, ReadStatus, ReceiveResult, SettleReply
from kvtransfer.session import AskSettle, CancelRead, End, ReceiveWindow, RxSession, SessionCommand, StartRead
from kvtransfer.states import SessionState
from manager import RequestId
from tests.fakes.transfer_values import EPOCH, LAYOUT, OWNER, PAGE_BYTES, lease, pages, ticket

ATTEMPT = RequestId("attempt")
WINDOW = ReceiveWindow(start_s=0.0, stop_reading_s=9.5, end_s=10.0)


def ready(slots: tuple[int, ...] = (5, 6)) -> RxSession:
    session = RxSession(ATTEMPT, ticket(lease((1, 2))), WINDOW, ReaderId("reader"))
    assert session.prepare(LAYOUT, pages(slots), 0.0) is None
    return session


def reading() -> RxSession:
    session = ready()
    assert isinstance(session.begin(0.0), StartRead)
    return session


def asking() -> RxSession:
    session = reading()
    assert isinstance(session.on_read_status(ReadStatus.DONE, "", 1.0), AskSettle)
    return session


def result_of(command: SessionCommand | None) -> ReceiveResult:
    assert isinstance(command, End)
    return command.outcome.result


def test_a_good_receive_reads_asks_and_ends_verified() -> None:
    session = ready()
    start = session.begin(0.0)
    assert isinstance(start, StartRead)
    assert sum(copy.num_bytes for copy in start.copies) == session.num_bytes == 2 * PAGE_BYTES
    assert session.on_read_status(ReadStatus.PENDING, "", 0.5) is None
    ask = session.on_read_status(ReadStatus.DONE, "", 1.0)
    assert ask == AskSettle(OWNER, session.ticket.lease_id, EPOCH, ReaderId("reader"))
    end = session.on_settle_reply(SettleReply.OK, 2.0)
    assert result_of(end) is ReceiveResult.VERIFIED
    assert session.state is SessionState.FULLY_TRANSFERRED


def test_a_receive_without_pages_goes_straight_to_the_settle() -> None:
    session = ready(slots=())
    assert isinstance(session.begin(0.0), AskSettle)
    assert session.state is SessionState.KV_TRANSFERRED


def test_an_expired_answer_ends_expired() -> None:
    assert result_of(asking().on_settle_reply(SettleReply.EXPIRED, 2.0)) is ReceiveResult.EXPIRED


def test_a_lost_answer_ends_failed() -> None:
    assert result_of(asking().on_settle_lost("gone", 2.0)) is ReceiveResult.FAILED


@pytest.mark.parametrize("status", [ReadStatus.DONE, ReadStatus.FAILED, ReadStatus.CANCELLED])
def test_a_cancelled_receive_stays_open_until_the_transport_has_stopped(status: ReadStatus) -> None:
    session = reading()
    assert session.on_cancel(1.0) == CancelRead()
    assert session.is_stopping
    assert session.on_read_status(ReadStatus.PENDING, "", 2.0) is None
    assert not session.is_ended
    assert result_of(session.on_read_status(status, "too late", 3.0)) is ReceiveResult.CANCELLED


def test_the_first_verdict_stands() -> None:
    session = reading()
    assert session.on_tick(9.5) == CancelRead()
    assert session.on_cancel(9.6) is None
    assert session.on_read_error("broken") == CancelRead()
    assert result_of(session.on_read_status(ReadStatus.CANCELLED, "", 9.7)) is ReceiveResult.EXPIRED
    assert session.num_late == 1


def test_a_broken_read_ends_failed_once_it_stopped() -> None:
    session = reading()
    assert session.on_read_error("bad wire") == CancelRead()
    end = session.on_read_status(ReadStatus.CANCELLED, "", 1.0)
    assert isinstance(end, End)
    assert (end.outcome.result, end.outcome.message) == (ReceiveResult.FAILED, "bad wire")


def test_a_read_that_the_transport_cancelled_by_itself_is_a_failure() -> None:
    end = reading().on_read_status(ReadStatus.CANCELLED, "", 1.0)
    assert isinstance(end, End)
    assert (end.outcome.result, end.outcome.message) == (
        ReceiveResult.FAILED,
        "the transport reports the read as cancelled",
    )


def test_deadlines_act_only_in_the_state_they_bound() -> None:
    session = reading()
    assert session.next_deadline_s() == 9.5
    assert session.on_tick(9.4) is None
    session.on_read_status(ReadStatus.DONE, "", 9.4)
    assert session.next_deadline_s() == 10.0
    assert session.on_tick(9.9) is None
    assert result_of(session.on_tick(10.0)) is ReceiveResult.FAILED
    assert session.next_deadline_s() is None


def test_a_stopping_session_has_no_deadline_left() -> None:
    session = reading()
    session.on_cancel(1.0)
    assert session.next_deadline_s() is None
    assert session.on_tick(99.0) is None


def test_signals_after_the_end_are_counted_and_change_nothing() -> None:
    session = asking()
    end = session.on_settle_reply(SettleReply.EXPIRED, 2.0)
    assert isinstance(end, End)
    assert session.begin(3.0) is None
    assert session.on_read_status(ReadStatus.DONE, "", 3.0) is None
    assert session.on_read_error("late") is None
    assert session.on_read_refused("late", 3.0) is None
    assert session.on_settle_reply(SettleReply.OK, 3.0) is None
    assert session.on_settle_lost("late", 3.0) is None
    assert session.on_cancel(3.0) is None
    assert session.on_tick(99.0) is None
    assert session.num_late == 7
    assert session.state is SessionState.ERROR


def test_an_answer_before_the_last_byte_is_no_answer() -> None:
    session = reading()
    assert session.on_settle_reply(SettleReply.OK, 1.0) is None
    assert session.state is SessionState.TRANSFERRING
    assert session.num_late == 1


def test_preparing_twice_is_a_bug_of_ours() -> None:
    session = ready()
    with pytest.raises(TransferLogicError):
        session.prepare(LAYOUT, pages((5, 6)), 0.0)
