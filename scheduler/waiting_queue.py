"""`WaitingQueue`: contexts that hold nothing yet, first in line first.

The order is a key that never changes while a request waits, so that a pass looks at the head only and
costs the same however many wait behind it (S6). A removal leaves a tombstone that the head skips.
"""

import heapq
from collections.abc import Callable

from manager import RequestId
from scheduler.request import Request

Rank = tuple[int, int]
"""Smaller is earlier in line; ends in the order of arrival, so that no two are equal."""


class WaitingQueue:
    """A priority queue of requests with removal from the middle."""

    __slots__ = ("_heap", "_line", "_present", "_rank_of")

    def __init__(self, rank_of: Callable[[Request], Rank]) -> None:
        """`rank_of` must not change for a request while it waits."""
        self._rank_of = rank_of
        self._heap: list[tuple[Rank, Request]] = []
        self._present: dict[RequestId, Request] = {}
        self._line: dict[RequestId, Request] | None = None

    def __len__(self) -> int:
        """Requests that wait."""
        return len(self._present)

    def push(self, request: Request) -> None:
        """Put it in line; O(log n). Pushing back what `pop` gave restores the line exactly."""
        self._present[request.request_id] = request
        if self._line is not None and request.request_id not in self._line:
            self._line = None
        heapq.heappush(self._heap, (self._rank_of(request), request))

    def peek(self) -> Request | None:
        """The first in line, or None."""
        self._drop_tombstones()
        return self._heap[0][1] if self._heap else None

    def pop(self) -> Request:
        """Take the first in line out. Raises IndexError when none waits."""
        self._drop_tombstones()
        _, request = heapq.heappop(self._heap)
        del self._present[request.request_id]
        return request

    def discard(self, request_id: RequestId) -> None:
        """Take one out of the line, wherever it is; nothing happens when it is not there."""
        self._present.pop(request_id, None)

    def in_order(self) -> list[Request]:
        """Everyone, first in line first, for reports; sorted only when somebody came since.

        Who left since is skipped; who left and came back stands where it stood.
        """
        if self._line is None or len(self._line) > 2 * len(self._present) + 64:
            ordered = sorted(self._present.values(), key=self._rank_of)
            self._line = {request.request_id: request for request in ordered}
        present = self._present
        return [request for request_id, request in self._line.items() if request_id in present]

    def _drop_tombstones(self) -> None:
        while self._heap and self._present.get(self._heap[0][1].request_id) is not self._heap[0][1]:
            heapq.heappop(self._heap)
