"""`EventQueue`: virtual time. Events run in order of time, and of posting where times are equal."""

import heapq
from collections.abc import Callable


class EventQueue:
    """A clock that jumps from event to event.

    Attributes:
        now_s: virtual seconds since the start.
        num_events: events run so far.
    """

    __slots__ = ("_heap", "_num_posted", "now_s", "num_events")

    def __init__(self) -> None:
        """Start at 0 with nothing to do."""
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._num_posted = 0
        self.now_s = 0.0
        self.num_events = 0

    def at(self, when_s: float, action: Callable[[], None]) -> None:
        """Run `action` at `when_s`. Raises ValueError when that is past."""
        if when_s < self.now_s:
            msg = f"an event for {when_s} s was posted at {self.now_s} s"
            raise ValueError(msg)
        self._num_posted += 1
        heapq.heappush(self._heap, (when_s, self._num_posted, action))

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        """Run `action` in `delay_s` seconds."""
        self.at(self.now_s + delay_s, action)

    def run_while(self, condition: Callable[[], bool], limit_s: float) -> bool:
        """Run events while `condition` holds; False when it still holds at `limit_s` or nothing is left to do."""
        while condition():
            if not self._heap or self._heap[0][0] > limit_s:
                return False
            self._run_next()
        return True

    def run_until(self, when_s: float) -> None:
        """Run all events up to `when_s`, then be there."""
        while self._heap and self._heap[0][0] <= when_s:
            self._run_next()
        self.now_s = max(self.now_s, when_s)

    def _run_next(self) -> None:
        when_s, _, action = heapq.heappop(self._heap)
        self.now_s = when_s
        self.num_events += 1
        action()
