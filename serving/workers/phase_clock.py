"""How long each phase of an attempt took on this worker: durations for the request's timeline."""

from manager import WorkerName
from scheduler.messages import PhaseDurations
from scheduler.request import Request
from scheduler.spec import AttemptId


class PhaseClock:
    """Per attempt, the present phase, its start, and the seconds of those that ended.

    Phases, in the words of the timeline: queue (waiting for a first chunk), context, offer (waiting for
    room), transfer, generation.
    """

    def __init__(self, worker: WorkerName) -> None:
        """Report as `worker`."""
        self._worker = worker
        self._present: dict[AttemptId, tuple[str, float]] = {}
        self._seconds: dict[AttemptId, dict[str, float]] = {}
        self._has_token: set[AttemptId] = set()

    def enter(self, attempt_id: AttemptId, phase: str, now_s: float) -> None:
        """End the present phase, begin `phase`; the same phase again changes nothing."""
        present = self._present.get(attempt_id)
        if present is not None:
            name, since_s = present
            if name == phase:
                return
            seconds = self._seconds.setdefault(attempt_id, {})
            seconds[name] = seconds.get(name, 0.0) + now_s - since_s
        self._present[attempt_id] = (phase, now_s)

    def is_first_token(self, attempt_id: AttemptId) -> bool:
        """Whether this token is the attempt's first here; True once."""
        if attempt_id in self._has_token:
            return False
        self._has_token.add(attempt_id)
        return True

    def durations(self, request: Request, now_s: float) -> PhaseDurations:
        """All phases so far, the present one up to `now_s`."""
        seconds = dict(self._seconds.get(request.attempt_id, {}))
        present = self._present.get(request.attempt_id)
        if present is not None:
            seconds[present[0]] = seconds.get(present[0], 0.0) + now_s - present[1]
        return PhaseDurations(self._worker, seconds, request.num_reused_tokens)

    def forget(self, attempt_id: AttemptId) -> None:
        """The attempt has ended here."""
        self._present.pop(attempt_id, None)
        self._seconds.pop(attempt_id, None)
        self._has_token.discard(attempt_id)
