"""`TransferAgent`: one worker's receives and leases, driven by `poll`.

Three kinds of thread meet here. The *loop* starts and cancels receives, holds and drops leases, and drains
outcomes. The *agent thread* calls `poll`, and it alone calls the transport and the peers, so the bytes move
outside the lock. A *peer's* call arrives as `settle` and is answered from the lease table at once, whatever
the loop or the bytes are doing (C5). One lock guards the tables and is never held across I/O.

Nothing here touches pages: what follows for them goes to the loop as a `TransferOutcome`, one per receive
and one per lease that was not dropped (I2).

    while running:                       # the agent thread, in `serving`
        agent.wait_for_work(agent.poll(clock()))

An exception of the transport or of a peer ends that receive as FAILED; the agent goes on.
"""

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from configs import TransferConfig
from kvtransfer.errors import TransferLogicError
from kvtransfer.lease_table import LeaseTable
from kvtransfer.messages import (
    MemoryDescription,
    PoolLayout,
    ReaderId,
    ReceiveOutcome,
    ReceiveResult,
    SettleReply,
    TransferOutcome,
    TransferTicket,
)
from kvtransfer.peers import PeerChannel
from kvtransfer.receive import Receive
from kvtransfer.reservation_table import ReservationTable
from kvtransfer.session import ReceiveWindow, RxSession
from kvtransfer.transports.base import Transport
from manager import Epoch, LeaseId, PageLease, PageLocation, RequestId, WorkerName

_log = logging.getLogger(__name__)
_COUNTERS = (
    "receives_started",
    "receives_verified",
    "receives_failed",
    "receives_expired",
    "receives_cancelled",
    "bytes_received",
    "bytes_verified",
    "leases_granted",
    "leases_renewed",
    "leases_settled",
    "leases_expired",
    "leases_dropped",
    "reservations_made",
    "reservations_renewed",
    "reservations_expired",
    "late_signals",
)
_LATE_OF_TABLES = ("late_renewals", "late_settles", "repeated_settles", "late_reservations")
_COUNTER_OF_RESULT = {
    ReceiveResult.VERIFIED: "receives_verified",
    ReceiveResult.FAILED: "receives_failed",
    ReceiveResult.EXPIRED: "receives_expired",
    ReceiveResult.CANCELLED: "receives_cancelled",
}


def _nobody_to_wake() -> None:
    """The default `wake`."""


class TransferAgent:
    """Everything of the transfer layer that one life of a worker has.

    Args:
        transport: already registered, or registered before the first `make_ticket` and `start_receive`.
        peers: reaches the other workers' agents.
        config: deadlines and poll interval.
        layout: shape of our own pages.
        worker: our name, as owner in tickets.
        epoch: this life.
        wake: called after outcomes arrived, outside the lock, from the agent thread or a peer's.
    """

    def __init__(  # noqa: PLR0913 -- six collaborators and the loop's bell; a bundle would only rename them
        self,
        transport: Transport,
        peers: PeerChannel,
        config: TransferConfig,
        layout: PoolLayout,
        worker: WorkerName,
        epoch: Epoch,
        *,
        wake: Callable[[], None] = _nobody_to_wake,
    ) -> None:
        """Start without leases and receives."""
        self._transport = transport
        self._peers = peers
        self._config = config
        self._layout = layout
        self._worker = worker
        self._epoch = epoch
        self._wake = wake
        self._lock = threading.Lock()
        self._work = threading.Event()
        self._leases = LeaseTable(epoch, config.lease_duration_s)
        self._reservations = ReservationTable(config.reservation_duration_s)
        self._receives: dict[RequestId, Receive] = {}
        self._outcomes: list[TransferOutcome] = []
        self._counts: Counter[str] = Counter()
        self._memory: MemoryDescription | None = None
        self._num_receives = 0
        self._is_closed = False

    @property
    def layout(self) -> PoolLayout:
        """Of our own pages."""
        return self._layout

    # -- owner's side: leases ------------------------------------------------------------------------

    def hold(self, lease: PageLease, now_s: float) -> None:
        """Start the life of a lease that the manager granted. Raises TransferLogicError when it is no new one."""
        with self._lock:
            self._leases.hold(lease, now_s)
        if self._transport.needs_serving:
            self.kick()  # its reader needs us from now on

    def make_ticket(self, lease: PageLease) -> TransferTicket:
        """What a reader needs. Raises TransferLogicError for a lease of another epoch."""
        if lease.epoch != self._epoch:
            msg = f"lease {lease.lease_id} has epoch {lease.epoch}, {self._worker} is in epoch {self._epoch}"
            raise TransferLogicError(msg)
        if self._memory is None:
            self._memory = self._transport.describe()
        return TransferTicket(self._worker, lease, self._layout, self._memory)

    def renew(self, lease_ids: Iterable[LeaseId], now_s: float) -> int:
        """Give live leases their full duration again; ended and unknown ones are counted and ignored."""
        with self._lock:
            return self._leases.renew(lease_ids, now_s)

    def drop_lease(self, lease_id: LeaseId) -> bool:
        """End a lease early (the request was cancelled).

        Returns:
            True when it was held: it ended by this call, no `LeaseOutcome` follows, and the caller ends the
            manager's hold. False when it had ended already (its outcome was or will be taken) or is unknown.
        """
        with self._lock:
            return self._leases.drop(lease_id)

    def settle(self, lease_id: LeaseId, epoch: Epoch, reader: ReaderId, now_s: float) -> SettleReply:
        """Answer a peer that has read its last byte. Any thread; waits for nothing but the lock."""
        with self._lock:
            if self._is_closed:
                return SettleReply.EXPIRED
            reply, outcome = self._leases.settle(lease_id, epoch, reader, now_s)
            if outcome is not None:
                self._outcomes.append(outcome)
        if outcome is not None:
            self._wake()
        return reply

    # -- receiver's side: reservations ---------------------------------------------------------------

    def hold_reservation(self, request_id: RequestId, now_s: float) -> None:
        """Start the deadline of a committed reservation. Raises TransferLogicError when it is held already."""
        with self._lock:
            self._reservations.hold(request_id, now_s)
        self.kick()

    def renew_reservations(self, request_ids: Iterable[RequestId], now_s: float) -> int:
        """Give live reservations their full duration again; ended and unknown ones are counted and ignored."""
        with self._lock:
            return self._reservations.renew(request_ids, now_s)

    def release_reservation(self, request_id: RequestId) -> bool:
        """Activated or given up: no expiry follows. False when it has ended already or is unknown."""
        with self._lock:
            return self._reservations.release(request_id)

    # -- receiver's side -----------------------------------------------------------------------------

    def start_receive(
        self, request_id: RequestId, ticket: TransferTicket, destinations: Sequence[PageLocation], now_s: float
    ) -> None:
        """Read the pages of the destinations' blocks. Exactly one `ReceiveOutcome` follows, whatever happens.

        A ticket that does not fit ours, lacks a page or contradicts itself gives a FAILED outcome.

        Args:
            request_id: the attempt that receives; unique per attempt.
            ticket: what the owner handed over.
            destinations: our own filling pages; they must stay ours until the outcome is taken.
            now_s: our clock.

        Raises:
            TransferLogicError: a receive of that attempt is running, the agent is closed, or
                `destinations` contradict themselves. Nothing has changed then.
        """
        # A reader knows no more of the lease's age than this; the settle finds out (see `session`).
        end_s = now_s + self._config.lease_duration_s
        window = ReceiveWindow(now_s, end_s - self._config.heartbeat_s, end_s)
        with self._lock:
            self._num_receives += 1
            reader = ReaderId(f"{self._worker}.{self._epoch}.{self._num_receives}")
            if self._is_closed or request_id in self._receives:
                msg = f"{request_id}: the agent is closed, or a receive of this attempt is running"
                raise TransferLogicError(msg)
        session = RxSession(request_id, ticket, window, reader)
        end = session.prepare(self._layout, destinations, now_s)
        with self._lock:
            self._counts["receives_started"] += 1
            if end is None:
                self._receives[request_id] = Receive(session, self._transport, self._peers)
        if end is not None:
            self._finish(session, end.outcome)
        self.kick()

    def cancel_receive(self, request_id: RequestId) -> None:
        """Stop a receive; its outcome follows once nothing is being written. Ended ones: counted, ignored."""
        with self._lock:
            receive = self._receives.get(request_id)
            if receive is None or receive.is_cancel_wanted:
                self._counts["late_signals"] += 1
                return
            receive.is_cancel_wanted = True
        self.kick()

    # -- outcomes and reports ------------------------------------------------------------------------

    @property
    def has_outcomes(self) -> bool:
        """Whether `take_outcomes` would return any."""
        return bool(self._outcomes)

    def take_outcomes(self) -> list[TransferOutcome]:
        """Every outcome since the last call, in order. The loop's."""
        with self._lock:
            outcomes, self._outcomes = self._outcomes, []
        return outcomes

    @property
    def num_active(self) -> int:
        """Receives that have not ended."""
        return len(self._receives)

    @property
    def num_leases(self) -> int:
        """Leases that are held for a reader."""
        with self._lock:
            return self._leases.num_held

    @property
    def num_reservations(self) -> int:
        """Reservations whose deadline runs."""
        with self._lock:
            return self._reservations.num_held

    def counters(self) -> Mapping[str, int]:
        """What happened so far, cumulative; every name is always there."""
        with self._lock:
            counts = self._counts + Counter(self._leases.counters()) + Counter(self._reservations.counters())
            # Counted by whoever moves them: a transport that moves nothing cannot hide behind what was planned.
            counts["bytes_received"] = self._transport.bytes_moved
            counts["late_signals"] += sum(counts[name] for name in _LATE_OF_TABLES)
            return {name: counts[name] for name in _COUNTERS}

    # -- the agent thread ----------------------------------------------------------------------------

    def poll(self, now_s: float) -> float:
        """Move everything one step: sweep leases and reservations, start, advance and stop reads, look for answers.

        Blocks for one poll of the transport per receive at most (of a transport that copies in `poll`: for
        one read's piece in all). Never raises for a peer's or a transport's fault.

        Returns:
            Seconds after which it wants to be called again; 0.0 while polling moves bytes.
        """
        with self._lock:
            expired: list[TransferOutcome] = [*self._leases.sweep(now_s), *self._reservations.sweep(now_s)]
            self._outcomes.extend(expired)
            receives = list(self._receives.values())
        if expired:
            self._wake()
        self._serve()
        # In order of arrival, one copying read at a time: the first is done soonest, and none later for it.
        may_copy = True
        for receive in receives:
            if may_copy:
                takes_turn = receive.wants_to_copy
                receive.step(now_s)
                # One that waits for its peer lets others pass.
                may_copy = not (takes_turn and self._transport.is_moving)
            else:
                receive.step_without_copying(now_s)
            if receive.outcome is not None:
                self._finish(receive.session, receive.outcome)
        return self._delay_s(now_s)

    def wait_for_work(self, timeout_s: float) -> None:
        """Sleep until `timeout_s` has passed or `kick` was called, whichever comes first."""
        self._work.wait(timeout_s)
        self._work.clear()

    def kick(self) -> None:
        """End the sleep of `wait_for_work` (a receive began, an answer came, the thread shall stop)."""
        self._work.set()

    def close(self) -> None:
        """Stop answering and close the transport. After the agent thread has ended; may be called twice.

        Receives that still run give no outcome: their pages die with the process or stay quarantined.
        """
        with self._lock:
            self._is_closed = True
        self.kick()
        self._transport.close()

    def _finish(self, session: RxSession, outcome: ReceiveOutcome) -> None:
        with self._lock:
            self._receives.pop(session.request_id, None)
            self._outcomes.append(outcome)
            self._counts[_COUNTER_OF_RESULT[outcome.result]] += 1
            self._counts["bytes_verified"] += outcome.num_bytes * (outcome.result is ReceiveResult.VERIFIED)
            self._counts["late_signals"] += session.num_late
        self._wake()

    def _serve(self) -> None:
        """Give peers' reads their turn."""
        if self._transport.needs_serving:
            try:
                self._transport.serve()
            except Exception:  # a peer's read is the peer's to give up
                _log.exception("%s: serving peers failed", self._worker)

    def _delay_s(self, now_s: float) -> float:
        with self._lock:
            receives = list(self._receives.values())
            is_read_from = self._leases.num_held > 0
            due_s = min(self._leases.next_deadline_s, self._reservations.next_deadline_s)
            idle_s = min(due_s - now_s, self._config.heartbeat_s)
        if any(receive.is_reading for receive in receives):
            return 0.0 if self._transport.is_moving else self._config.agent_poll_s
        if receives or (is_read_from and self._transport.needs_serving):
            return self._config.agent_poll_s
        return max(idle_s, 0.0)
