"""Any signals in any order: a session ends at most once, and is never trusted by mistake."""

from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st

from kvtransfer.messages import ReaderId, ReadStatus, ReceiveResult, SettleReply
from kvtransfer.session import AskSettle, CancelRead, End, ReceiveWindow, RxSession, SessionCommand, StartRead
from kvtransfer.states import SessionState
from manager import RequestId
from tests.fakes.transfer_values import LAYOUT, lease, pages, ticket

WINDOW = ReceiveWindow(start_s=0.0, stop_reading_s=9.5, end_s=10.0)
SIGNALS = (
    "begin",
    "pending",
    "done",
    "failed",
    "stopped",
    "read_error",
    "refused",
    "ok",
    "expired",
    "lost",
    "cancel",
    "tick",
)


def send(session: RxSession, signal: str, now_s: float) -> SessionCommand | None:
    """Deliver one signal."""
    calls: dict[str, Callable[[], SessionCommand | None]] = {
        "begin": lambda: session.begin(now_s),
        "pending": lambda: session.on_read_status(ReadStatus.PENDING, "", now_s),
        "done": lambda: session.on_read_status(ReadStatus.DONE, "", now_s),
        "failed": lambda: session.on_read_status(ReadStatus.FAILED, "", now_s),
        "stopped": lambda: session.on_read_status(ReadStatus.CANCELLED, "", now_s),
        "read_error": lambda: session.on_read_error("broken"),
        "refused": lambda: session.on_read_refused("refused", now_s),
        "ok": lambda: session.on_settle_reply(SettleReply.OK, now_s),
        "expired": lambda: session.on_settle_reply(SettleReply.EXPIRED, now_s),
        "lost": lambda: session.on_settle_lost("lost", now_s),
        "cancel": lambda: session.on_cancel(now_s),
        "tick": lambda: session.on_tick(now_s),
    }
    return calls[signal]()


STOPPING_SIGNALS = {"done", "failed", "stopped", "refused"}


@settings(max_examples=400, derandomize=True, deadline=None, database=None)
@given(st.integers(0, 2), st.lists(st.tuples(st.sampled_from(SIGNALS), st.floats(0, 2)), max_size=14))
def test_whatever_arrives_a_session_ends_once_and_only_with_all_bytes_and_an_ok_is_it_trusted(
    num_blocks: int, signals: list[tuple[str, float]]
) -> None:
    session = RxSession(RequestId("attempt"), ticket(lease((1, 2))), WINDOW, ReaderId("reader"))
    assert session.prepare(LAYOUT, pages(tuple(range(num_blocks))), 0.0) is None
    now_s, commands, history = 0.0, list[SessionCommand](), list[str]()
    for signal, seconds in signals:
        now_s += seconds
        was_reading = session.state is SessionState.TRANSFERRING
        was_ended = session.is_ended
        command = send(session, signal, now_s)
        history.append(signal)
        if command is not None:
            commands.append(command)
        assert not (was_ended and command is not None), "an ended session asks for nothing"
        if was_reading and session.is_ended:
            assert signal in STOPPING_SIGNALS, "it ended while bytes could be written"
    ends = [command for command in commands if isinstance(command, End)]
    assert len(ends) == session.is_ended
    assert sum(isinstance(command, StartRead) for command in commands) <= 1
    assert sum(isinstance(command, AskSettle) for command in commands) <= 1
    if ends and ends[0].outcome.result is ReceiveResult.VERIFIED:
        assert any(isinstance(command, AskSettle) for command in commands)
        assert "ok" in history
        assert num_blocks == 0 or "done" in history
        assert not any(isinstance(command, CancelRead) for command in commands)


@settings(max_examples=100, derandomize=True, deadline=None, database=None)
@given(st.lists(st.sampled_from(SIGNALS), max_size=10))
def test_whatever_has_happened_a_session_ends_when_its_read_stops_and_its_time_is_over(signals: list[str]) -> None:
    session = RxSession(RequestId("attempt"), ticket(lease((1, 2))), WINDOW, ReaderId("reader"))
    session.prepare(LAYOUT, pages((4, 5)), 0.0)
    for signal in signals:
        send(session, signal, 1.0)
    session.begin(99.0)
    session.on_tick(99.0)
    if session.state is SessionState.TRANSFERRING:
        session.on_read_status(ReadStatus.CANCELLED, "", 99.0)
    assert session.is_ended
