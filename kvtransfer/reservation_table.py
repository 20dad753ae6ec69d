r"""The reservations that this worker has made, with their deadlines on its own clock (M7). Pure.

A reservation holds pages for a transfer that has not been activated. Whatever goes wrong elsewhere (its
context is never computed, its transfer never ends), it ends here at its deadline: the sweep is the agent's,
so it happens step or no step (I5). Knows nothing of pages: what an expiry means for them is the loop's.

    hold -> HELD -- release (activated, cancelled, failed) --> forgotten
             \----- deadline --> swept once, forgotten

Invariant: an entry that was ever seen at or past its deadline is not renewed any more, whatever clock value
a later call brings.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping

from kvtransfer.errors import TransferLogicError
from kvtransfer.messages import ReservationExpired
from manager import RequestId


class ReservationTable:
    """Reservations of one life of a worker. Not thread-safe; every time is this side's monotonic clock, seconds.

    Args:
        duration_s: how long a reservation lives after it was made or renewed.
    """

    def __init__(self, duration_s: float) -> None:
        """Start empty."""
        self._duration_s = duration_s
        self._deadlines_s: dict[RequestId, float] = {}
        self._next_deadline_s = math.inf
        self._counts: Counter[str] = Counter()

    @property
    def num_held(self) -> int:
        """Reservations that have neither been released nor expired."""
        return len(self._deadlines_s)

    @property
    def next_deadline_s(self) -> float:
        """No entry needs a sweep before this time; infinite for an empty table."""
        return self._next_deadline_s

    def counters(self) -> Mapping[str, int]:
        """What happened so far, cumulative."""
        return dict(self._counts)

    def hold(self, request_id: RequestId, now_s: float) -> None:
        """A reservation was committed. Raises TransferLogicError when it is held already."""
        if request_id in self._deadlines_s:
            msg = f"{request_id} holds a reservation already"
            raise TransferLogicError(msg)
        self._deadlines_s[request_id] = now_s + self._duration_s
        self._next_deadline_s = min(self._next_deadline_s, now_s + self._duration_s)
        self._counts["reservations_made"] += 1

    def renew(self, request_ids: Iterable[RequestId], now_s: float) -> int:
        """Give live reservations their full duration again; others are counted as late. Returns how many were live."""
        num_renewed = 0
        for request_id in request_ids:
            deadline_s = self._deadlines_s.get(request_id, -math.inf)
            if now_s >= deadline_s:
                self._counts["late_reservations"] += 1
                if request_id in self._deadlines_s:
                    # Seen past its deadline: no older reading of the clock may revive it.
                    self._deadlines_s[request_id] = self._next_deadline_s = -math.inf
                continue
            self._deadlines_s[request_id] = max(deadline_s, now_s + self._duration_s)
            num_renewed += 1
        self._counts["reservations_renewed"] += num_renewed
        return num_renewed

    def release(self, request_id: RequestId) -> bool:
        """End a reservation before its deadline; False when it has ended or was never here."""
        return self._deadlines_s.pop(request_id, None) is not None

    def sweep(self, now_s: float) -> tuple[ReservationExpired, ...]:
        """Forget what is past its deadline, and name it. Cheap when nothing is due."""
        if now_s < self._next_deadline_s:
            return ()
        expired = [request_id for request_id, deadline_s in self._deadlines_s.items() if now_s >= deadline_s]
        for request_id in expired:
            del self._deadlines_s[request_id]
        self._counts["reservations_expired"] += len(expired)
        self._next_deadline_s = min(self._deadlines_s.values(), default=math.inf)
        return tuple(ReservationExpired(request_id) for request_id in expired)
