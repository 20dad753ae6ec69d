"""`LifeEvents`: lives of processes that began and ended lately, as the central scheduler learnt of them. Bounded."""

import time
from collections import deque
from collections.abc import Callable

_KEPT = 1024


class LifeEvents:
    """For `pdserve trace export`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Nothing has happened."""
        self._clock = clock
        self._events: deque[tuple[str, str, float]] = deque(maxlen=_KEPT)
        self._lost: set[tuple[str, object]] = set()

    def note(self, process: str, message: str) -> None:
        """Something happened to it just now."""
        self._events.append((process, message, self._clock()))

    def note_loss(self, process: str, life: object, reason: str) -> None:
        """A life is over. The same again changes nothing."""
        if (process, life) not in self._lost:
            self._lost.add((process, life))
            self.note(process, f"lost: {reason}")

    def tell(self, seconds: float) -> tuple[tuple[str, str, float], ...]:
        """(process, message, seconds ago) of the last `seconds`."""
        now_s = self._clock()
        return tuple((*what, now_s - at_s) for *what, at_s in self._events if now_s - at_s <= seconds)  # type: ignore[misc] # mypy loses the tuple's length
