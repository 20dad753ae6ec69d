"""`Receive`: one session's commands, carried out against the transport and the peers. The agent thread's.

Turns every exception of theirs into an event of that session, so that one bad peer costs one receive.
Decides nothing itself: `session` does.
"""

import logging
from contextlib import suppress
from typing import assert_never

from kvtransfer.errors import TransferLogicError
from kvtransfer.messages import ReadStatus, ReceiveOutcome
from kvtransfer.peers import PeerChannel, PendingReply
from kvtransfer.session import AskSettle, CancelRead, End, RxSession, SessionCommand, StartRead
from kvtransfer.states import SessionState
from kvtransfer.transports.base import ReadId, Transport

_log = logging.getLogger(__name__)


class Receive:
    """A session with what runs for it.

    Attributes:
        session: the state machine; READY when it comes here.
        is_cancel_wanted: set by the loop, at most once; taken at the next step.
        outcome: None until the session has ended.
    """

    def __init__(self, session: RxSession, transport: Transport, peers: PeerChannel) -> None:
        """Take over a prepared session; nothing is started yet."""
        self.session = session
        self.is_cancel_wanted = False
        self.outcome: ReceiveOutcome | None = None
        self._transport = transport
        self._peers = peers
        self._read_id: ReadId | None = None
        self._is_cancel_sent = False
        self._reply: PendingReply | None = None

    @property
    def is_reading(self) -> bool:
        """Whether the transport may be writing into our pages."""
        return self.session.state is SessionState.TRANSFERRING

    @property
    def wants_to_copy(self) -> bool:
        """Whether polling its read moves bytes on this thread, so that it must wait for its turn."""
        return self._transport.copies_in_poll and not self.session.is_stopping and not self.session.is_ended

    def step(self, now_s: float) -> None:
        """Everything that is due, its share of copying included."""
        self.step_without_copying(now_s)
        if self.is_reading and self.wants_to_copy:
            self._poll_read(now_s)
        if self.session.state is SessionState.KV_TRANSFERRED:
            self._poll_reply(now_s)

    def step_without_copying(self, now_s: float) -> None:
        """As `step`, but leaves bytes that this thread would have to copy for a later step."""
        session = self.session
        if self.is_cancel_wanted and not session.is_stopping:
            self._carry_out(session.on_cancel(now_s), now_s)
        if session.state is SessionState.READY:
            self._carry_out(session.begin(now_s), now_s)
        self._carry_out(session.on_tick(now_s), now_s)
        if session.is_stopping and not self._is_cancel_sent:
            self._cancel_read()
        if self.is_reading and not self.wants_to_copy:
            self._poll_read(now_s)
        if session.state is SessionState.KV_TRANSFERRED:
            self._poll_reply(now_s)

    def _poll_read(self, now_s: float) -> None:
        session, read_id = self.session, self._read_id
        if read_id is None:
            msg = f"{session.request_id} is {session.state} without a read"
            raise TransferLogicError(msg)
        try:
            status = self._transport.poll(read_id)
            message = self._transport.error(read_id) if status is ReadStatus.FAILED else ""
        except Exception as error:
            if not session.is_stopping:
                _log.exception("%s: polling read %d failed", session.request_id, read_id)
            if self._transport.copies_in_poll:
                # It writes inside poll only, so nothing is being written now. Let it forget the read.
                with suppress(Exception):
                    self._transport.cancel(read_id)
                    self._transport.poll(read_id)
                self._carry_out(session.on_read_refused(_describe(error), now_s), now_s)
            else:
                self._carry_out(session.on_read_error(_describe(error)), now_s)
            return
        self._carry_out(session.on_read_status(status, message, now_s), now_s)

    def _poll_reply(self, now_s: float) -> None:
        session = self.session
        if self._reply is None:
            msg = f"{session.request_id} is {session.state} and did not ask the owner"
            raise TransferLogicError(msg)
        try:
            reply = self._reply.result()
        except Exception as error:  # whatever a peer's channel raises concerns this receive only
            self._carry_out(session.on_settle_lost(_describe(error), now_s), now_s)
            return
        if reply is not None:
            self._carry_out(session.on_settle_reply(reply, now_s), now_s)

    def _carry_out(self, command: SessionCommand | None, now_s: float) -> None:
        session = self.session
        match command:
            case None:
                pass
            case StartRead(source, copies):
                try:
                    self._read_id = self._transport.read(source, copies)
                except Exception as error:  # nothing was started
                    self._carry_out(session.on_read_refused(_describe(error), now_s), now_s)
            case CancelRead():
                self._cancel_read()
            case AskSettle(owner, lease_id, epoch, reader):
                try:
                    self._reply = self._peers.settle(owner, lease_id, epoch, reader)
                except Exception as error:
                    self._carry_out(session.on_settle_lost(_describe(error), now_s), now_s)
            case End(outcome):
                self.outcome = outcome
            case _:
                assert_never(command)

    def _cancel_read(self) -> None:
        """Ask the transport to stop; asked again at the next step when it raises."""
        if self._read_id is None:
            return
        try:
            self._transport.cancel(self._read_id)
        except Exception:
            _log.exception("%s: cancelling read %d failed", self.session.request_id, self._read_id)
        else:
            self._is_cancel_sent = True


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
