"""`SelfAudit`: a running worker recomputes its truth now and then (M6)."""

from collections.abc import Callable


class SelfAudit:
    """Runs an audit when it is due, so that all audits together take at most a given share of the time.

    Between two iterations only: nothing is half done then. A failed audit raises out of `run_if_due`, and the
    worker's thread ends with it: a worker whose books are wrong must not carry on.
    """

    def __init__(
        self, audit: Callable[[], None], period_s: float, max_share: float, clock: Callable[[], float]
    ) -> None:
        """Wait one period before the first.

        Args:
            audit: raises CorruptedError.
            period_s: between two audits, at least; 0 switches them off.
            max_share: of the time that audits may take; a long one makes the next one later.
            clock: monotonic seconds.
        """
        self._audit = audit
        self._period_s = period_s
        self._max_share = max_share
        self._clock = clock
        self._due_s = clock() + period_s if period_s else float("inf")
        self.num_audits = 0

    def run_if_due(self) -> None:
        """Audit when the time has come. Raises CorruptedError."""
        started_s = self._clock()
        if started_s < self._due_s:
            return
        self._audit()
        self.num_audits += 1
        ended_s = self._clock()
        self._due_s = ended_s + max(self._period_s, (ended_s - started_s) / self._max_share)
