"""`RxSession`: one receive, from a ticket to pages that may be trusted or must be discarded. No I/O.

Events come in by method, at most one command goes out of each; the agent carries it out. The life:

    prepare -> begin -> StartRead ... read done -> AskSettle ... OK -> End(VERIFIED)

Whatever else happens (cancel, failure, the lease's end), a session that may have bytes being written into
our pages first asks the transport to stop, and ends only when the transport says that it has (M7, I6).
Until then it is TRANSFERRING, with the verdict fixed by the first cause.

Invariants: it ends exactly once, so there is one `End`; VERIFIED only after every byte was read and the
owner then answered OK; a signal that no longer matters is counted and changes nothing.

Refuses to know transports, threads and clocks: `now_s` is passed in, on our own monotonic clock. The reader
does not know when the lease was given, only that it was live when the receive began or the settle will say
EXPIRED; so it counts the full duration from its own start, and stops reading one heartbeat before that.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvtransfer.errors import PeerError
from kvtransfer.messages import (
    MemoryDescription,
    PageCopy,
    PoolLayout,
    ReaderId,
    ReadStatus,
    ReceiveOutcome,
    ReceiveResult,
    SettleReply,
    TransferTicket,
)
from kvtransfer.plan import check_compatible, plan_copies
from kvtransfer.states import TERMINAL_SESSION_STATES, SessionEvent, SessionState, advance_session
from manager import Epoch, LeaseId, PageLocation, RequestId, WorkerName


@dataclass(frozen=True, slots=True)
class StartRead:
    """Ask the transport for these runs."""

    source: MemoryDescription
    copies: tuple[PageCopy, ...]


@dataclass(frozen=True, slots=True)
class CancelRead:
    """Ask the transport to stop, and go on polling it until it says that it has."""


@dataclass(frozen=True, slots=True)
class AskSettle:
    """Ask the owner whether the lease was live the whole time."""

    owner: WorkerName
    lease_id: LeaseId
    epoch: Epoch
    reader: ReaderId


@dataclass(frozen=True, slots=True)
class End:
    """The receive is over and nothing of it is being written."""

    outcome: ReceiveOutcome


SessionCommand = StartRead | CancelRead | AskSettle | End


@dataclass(frozen=True, slots=True)
class ReceiveWindow:
    """The times of one receive on our own clock, seconds."""

    start_s: float
    stop_reading_s: float
    """No byte is read from here on: one heartbeat before the lease may end."""
    end_s: float
    """No answer of the owner is awaited from here on."""


_EVENT_OF_RESULT = {
    ReceiveResult.FAILED: SessionEvent.FAIL,
    ReceiveResult.EXPIRED: SessionEvent.FAIL,
    ReceiveResult.CANCELLED: SessionEvent.CANCEL,
}


class RxSession:
    """One receive of one attempt. Not thread-safe."""

    def __init__(self, request_id: RequestId, ticket: TransferTicket, window: ReceiveWindow, reader: ReaderId) -> None:
        """Start in INIT. `reader` names this receive to the owner, and no other one."""
        self.reader = reader
        self.request_id = request_id
        self.ticket = ticket
        self.window = window
        self.state = SessionState.INIT
        self.copies: tuple[PageCopy, ...] = ()
        self.num_late = 0
        self._verdict: tuple[ReceiveResult, str] | None = None
        self._bytes_read = 0

    @property
    def is_ended(self) -> bool:
        """Whether `End` was given."""
        return self.state in TERMINAL_SESSION_STATES

    @property
    def is_stopping(self) -> bool:
        """Whether the outcome is decided and only the transport's word is missing."""
        return self._verdict is not None and not self.is_ended

    @property
    def num_bytes(self) -> int:
        """Bytes that the plan moves."""
        return sum(copy.num_bytes for copy in self.copies)

    def prepare(self, ours: PoolLayout, destinations: Sequence[PageLocation], now_s: float) -> End | None:
        """INIT -> READY: compare the pools and plan the runs. Called once.

        Returns:
            None, or the end of a receive that a wrong or incompatible ticket makes impossible.

        Raises:
            TransferLogicError: `destinations` contradict themselves; the session stays in INIT.
        """
        try:
            check_compatible(ours, self.ticket.layout)
            self.copies = plan_copies(ours, self.ticket, destinations)
        except PeerError as error:
            return self._end(ReceiveResult.FAILED, str(error), now_s)
        self._advance(SessionEvent.PLANNED)
        return None

    def begin(self, now_s: float) -> SessionCommand | None:
        """READY -> TRANSFERRING, or straight to the settle when we hold every page already."""
        if self.state is not SessionState.READY:
            self._late()
            return None
        if now_s >= self.window.stop_reading_s:
            return self._end(ReceiveResult.EXPIRED, "the lease was about to end before the read began", now_s)
        if not self.copies:
            self._advance(SessionEvent.NOTHING_TO_READ)
            return self._ask_settle()
        self._advance(SessionEvent.READ_STARTED)
        return StartRead(self.ticket.memory, self.copies)

    def on_read_refused(self, message: str, now_s: float) -> End | None:
        """The transport raised instead of starting, or proved that nothing of ours is being written."""
        if self.state is not SessionState.TRANSFERRING:
            self._late()
            return None
        result, reason = self._verdict or (ReceiveResult.FAILED, message)
        return self._end(result, reason, now_s)

    def on_read_error(self, message: str) -> CancelRead | None:
        """The transport broke in the middle; whether it still writes is unknown until it says so."""
        if self.state is not SessionState.TRANSFERRING:
            self._late()
            return None
        self._verdict = self._verdict or (ReceiveResult.FAILED, message)
        return CancelRead()

    def on_read_status(self, status: ReadStatus, message: str, now_s: float) -> SessionCommand | None:
        """What the transport reports; `message` says why for FAILED."""
        if self.state is not SessionState.TRANSFERRING:
            self._late()
            return None
        if status is ReadStatus.PENDING:
            return None
        if status is ReadStatus.DONE:
            self._bytes_read = self.num_bytes
        if self._verdict is not None:
            return self._end(*self._verdict, now_s)
        if status is ReadStatus.DONE:
            self._advance(SessionEvent.READ_DONE)
            return self._ask_settle()
        reason = message or f"the transport reports the read as {status}"
        return self._end(ReceiveResult.FAILED, reason, now_s)

    def on_settle_reply(self, reply: SettleReply, now_s: float) -> End | None:
        """The owner's answer."""
        if self.state is not SessionState.KV_TRANSFERRED:
            self._late()
            return None
        if reply is SettleReply.OK:
            return self._end(ReceiveResult.VERIFIED, "", now_s)
        return self._end(ReceiveResult.EXPIRED, f"{self.ticket.owner} says that the lease has ended", now_s)

    def on_settle_lost(self, message: str, now_s: float) -> End | None:
        """There will be no answer."""
        if self.state is not SessionState.KV_TRANSFERRED:
            self._late()
            return None
        return self._end(ReceiveResult.FAILED, message, now_s)

    def on_cancel(self, now_s: float) -> SessionCommand | None:
        """We no longer want the pages. A repeat, or one that comes after another verdict, is ignored."""
        if self.is_ended or self._verdict is not None:
            self._late()
            return None
        return self._stop(ReceiveResult.CANCELLED, "cancelled", now_s)

    def on_tick(self, now_s: float) -> SessionCommand | None:
        """Time has passed; acts at the two deadlines of the window."""
        if self.state is SessionState.KV_TRANSFERRED and now_s >= self.window.end_s:
            waited_s = self.window.end_s - self.window.start_s
            reason = f"{self.ticket.owner} did not answer settle within {waited_s:g} s of the start"
            return self._end(ReceiveResult.FAILED, reason, now_s)
        is_reading = self.state is SessionState.TRANSFERRING and self._verdict is None
        if is_reading and now_s >= self.window.stop_reading_s:
            return self._stop(ReceiveResult.EXPIRED, "the read did not end before the lease's last heartbeat", now_s)
        return None

    def next_deadline_s(self) -> float | None:
        """When `on_tick` has something to do; None while only the transport's word is missing."""
        if self.state is SessionState.KV_TRANSFERRED:
            return self.window.end_s
        if self.is_ended or self._verdict is not None:
            return None
        return self.window.stop_reading_s

    def _stop(self, result: ReceiveResult, reason: str, now_s: float) -> SessionCommand:
        if self.state is SessionState.TRANSFERRING:
            self._verdict = (result, reason)
            return CancelRead()
        return self._end(result, reason, now_s)

    def _ask_settle(self) -> AskSettle:
        return AskSettle(self.ticket.owner, self.ticket.lease_id, self.ticket.epoch, self.reader)

    def _end(self, result: ReceiveResult, message: str, now_s: float) -> End:
        event = SessionEvent.SETTLED if result is ReceiveResult.VERIFIED else _EVENT_OF_RESULT[result]
        self._advance(event)
        duration_s = now_s - self.window.start_s
        return End(ReceiveOutcome(self.request_id, result, self._bytes_read, duration_s, message))

    def _advance(self, event: SessionEvent) -> None:
        self.state = advance_session(self.state, event)

    def _late(self) -> None:
        self.num_late += 1
