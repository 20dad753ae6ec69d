r"""The leases that this worker has given, with their deadlines on its own clock (M7). Pure.

Knows nothing of pages: `manager` holds those. It answers one question that decides whether a reader may
trust what it read: was the lease live the whole time? A lease ends once, in one of three ways: settled
by its reader, expired, or dropped by us; only then may the manager reuse the pages.

    hold -> HELD -- settle in time --> SETTLED (remembered, so that asking twice answers OK twice)
             |  \-- drop -----------> forgotten
             \---- deadline --------> EXPIRED, forgotten by the next sweep

A lease has one reader: the first receive that settles it is remembered. Another one that comes later, of the
same attempt or not, has read pages that may have been reused since, and is told EXPIRED.

Invariant: an entry that was ever seen at or past its deadline never becomes live again, whatever clock
value a later call brings (calls come from several threads, each with a clock value taken a little earlier).
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from kvtransfer.errors import TransferLogicError
from kvtransfer.messages import LeaseOutcome, ReaderId, SettleReply
from manager import Epoch, LeaseId, PageLease, RequestId


class LeaseState(StrEnum):
    """Where a lease that we gave is."""

    HELD = "held"
    SETTLED = "settled"
    EXPIRED = "expired"


@dataclass(slots=True)
class _Entry:
    request_id: RequestId
    epoch: Epoch
    deadline_s: float
    """HELD: when it expires. SETTLED: when it is forgotten."""
    state: LeaseState = LeaseState.HELD
    reader: ReaderId | None = None


class LeaseTable:
    """Leases of one life of a worker. Not thread-safe; every time is this side's monotonic clock, seconds.

    Args:
        epoch: the life of the worker; a lease or a signal of another one is none of ours.
        duration_s: how long a lease lives after it was given or renewed.
    """

    def __init__(self, epoch: Epoch, duration_s: float) -> None:
        """Start empty."""
        self._epoch = epoch
        self._duration_s = duration_s
        self._entries: dict[LeaseId, _Entry] = {}
        self._next_deadline_s = math.inf
        self._counts: Counter[str] = Counter()

    @property
    def num_held(self) -> int:
        """Leases whose pages are still held for a reader."""
        return sum(1 for entry in self._entries.values() if entry.state is not LeaseState.SETTLED)

    @property
    def next_deadline_s(self) -> float:
        """No entry needs a sweep before this time; infinite for an empty table."""
        return self._next_deadline_s

    def counters(self) -> Mapping[str, int]:
        """What happened so far, cumulative."""
        return dict(self._counts)

    def state(self, lease_id: LeaseId) -> LeaseState | None:
        """Where a lease is; None once forgotten."""
        entry = self._entries.get(lease_id)
        return None if entry is None else entry.state

    def hold(self, lease: PageLease, now_s: float) -> None:
        """Start the lease's life.

        Raises:
            TransferLogicError: it is of another epoch, or known already.
        """
        if lease.epoch != self._epoch:
            msg = f"lease {lease.lease_id} of {lease.request_id} has epoch {lease.epoch}, this life is {self._epoch}"
            raise TransferLogicError(msg)
        if lease.lease_id in self._entries:
            msg = f"lease {lease.lease_id} of {lease.request_id} is held already"
            raise TransferLogicError(msg)
        deadline_s = now_s + self._duration_s
        self._entries[lease.lease_id] = _Entry(lease.request_id, lease.epoch, deadline_s)
        self._next_deadline_s = min(self._next_deadline_s, deadline_s)
        self._counts["leases_granted"] += 1

    def renew(self, lease_ids: Iterable[LeaseId], now_s: float) -> int:
        """Give live leases their full duration again; others are counted as late. Returns how many were live."""
        num_renewed = 0
        for lease_id in lease_ids:
            entry = self._entries.get(lease_id)
            if entry is None or not self._is_live(entry, now_s):
                self._counts["late_renewals"] += 1
                continue
            # A clock value from before the last renewal must not shorten the lease.
            entry.deadline_s = max(entry.deadline_s, now_s + self._duration_s)
            num_renewed += 1
        self._counts["leases_renewed"] += num_renewed
        return num_renewed

    def settle(
        self, lease_id: LeaseId, epoch: Epoch, reader: ReaderId, now_s: float
    ) -> tuple[SettleReply, LeaseOutcome | None]:
        """Answer a reader that has read its last byte.

        Returns:
            OK for a live lease of this epoch, and again for the same reader; else EXPIRED. With the first
            OK comes the outcome that lets the manager have the pages back.
        """
        entry = self._entries.get(lease_id)
        if entry is None or epoch != entry.epoch:
            self._counts["late_settles"] += 1
            return SettleReply.EXPIRED, None
        if entry.state is LeaseState.SETTLED:
            self._counts["repeated_settles" if reader == entry.reader else "late_settles"] += 1
            return (SettleReply.OK if reader == entry.reader else SettleReply.EXPIRED), None
        if not self._is_live(entry, now_s):
            self._counts["late_settles"] += 1
            return SettleReply.EXPIRED, None
        entry.state, entry.reader = LeaseState.SETTLED, reader
        entry.deadline_s = now_s + self._duration_s
        self._counts["leases_settled"] += 1
        return SettleReply.OK, LeaseOutcome(lease_id, entry.request_id, settled=True)

    def drop(self, lease_id: LeaseId) -> bool:
        """End a lease early: from now on its reader is told EXPIRED.

        Returns:
            True when it was held and ends by this call, with no outcome to follow; False when it ended
            before (its outcome says how) or was never here.
        """
        entry = self._entries.get(lease_id)
        if entry is None or entry.state is not LeaseState.HELD:
            return False
        del self._entries[lease_id]
        self._counts["leases_dropped"] += 1
        return True

    def sweep(self, now_s: float) -> tuple[LeaseOutcome, ...]:
        """Forget what is past its deadline; the outcomes of those that expired. Cheap when nothing is due."""
        if now_s < self._next_deadline_s:
            return ()
        expired: list[LeaseOutcome] = []
        for lease_id, entry in list(self._entries.items()):
            if entry.state is LeaseState.SETTLED:
                if now_s >= entry.deadline_s:
                    del self._entries[lease_id]
            elif not self._is_live(entry, now_s):
                del self._entries[lease_id]
                expired.append(LeaseOutcome(lease_id, entry.request_id, settled=False))
        self._counts["leases_expired"] += len(expired)
        self._next_deadline_s = min((entry.deadline_s for entry in self._entries.values()), default=math.inf)
        return tuple(expired)

    def _is_live(self, entry: _Entry, now_s: float) -> bool:
        if entry.state is LeaseState.HELD and now_s >= entry.deadline_s:
            entry.state = LeaseState.EXPIRED
            self._next_deadline_s = -math.inf  # whoever saw it first, the next sweep reports it
        return entry.state is LeaseState.HELD
