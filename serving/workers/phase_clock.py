"""How long each phase of an attempt took on this worker: durations for the request's timeline and its trace."""

from dataclasses import dataclass, field

from manager import WorkerName
from scheduler.durations import PhaseDurations, PhaseSpan
from scheduler.request import Request
from scheduler.spec import AttemptId, RequestUid
from serving.tracing.history import StepHistory, Stretch

_MAX_SPANS = 128
"""Of one attempt. One that is suspended again and again must not make its messages grow."""


@dataclass(slots=True)
class _Attempt:
    """Attributes: the present phase and its start; seconds by phase and stretches of those that ended."""

    uid: RequestUid
    phase: str
    since_s: float
    seconds: dict[str, float] = field(default_factory=dict)
    ended: list[Stretch] = field(default_factory=list)
    has_token: bool = False


class PhaseClock:
    """Per attempt, the present phase, its start, and the stretches that ended.

    Phases, in the words of the timeline: central (waiting at the central scheduler), queue (waiting for a first
    chunk), context, offer (waiting for room), transfer, generation, paused.
    """

    def __init__(self, worker: WorkerName, history: StepHistory) -> None:
        """Report as `worker`; every stretch goes to `history` as well."""
        self._worker = worker
        self._history = history
        self._attempts: dict[AttemptId, _Attempt] = {}

    def admit(self, attempt_id: AttemptId, uid: RequestUid, phase: str, waited_s: float, now_s: float) -> None:
        """The attempt has come, after it waited elsewhere for `waited_s`; it begins with `phase`."""
        self._attempts[attempt_id] = _Attempt(uid, "central", now_s - waited_s)
        self.enter(attempt_id, phase, now_s)

    def enter(self, attempt_id: AttemptId, phase: str, now_s: float) -> None:
        """End the present phase, begin `phase`; the same phase again changes nothing."""
        attempt = self._attempts.get(attempt_id)
        if attempt is None or attempt.phase == phase:
            return
        self._end_phase(attempt_id, attempt, now_s)
        attempt.phase, attempt.since_s = phase, now_s

    def chunk(self, attempt_id: AttemptId, num_tokens: int, began_s: float, ended_s: float) -> None:
        """A step has computed so many positions of the attempt's context."""
        attempt = self._attempts.get(attempt_id)
        if attempt is not None:
            self._keep(attempt, Stretch("chunk", attempt.uid, attempt_id, began_s, ended_s, num_tokens))

    def is_first_token(self, attempt_id: AttemptId) -> bool:
        """Whether this token is the attempt's first here; True once."""
        attempt = self._attempts.get(attempt_id)
        is_first = attempt is not None and not attempt.has_token
        if attempt is not None:
            attempt.has_token = True
        return is_first

    def durations(self, request: Request, now_s: float) -> PhaseDurations:
        """All phases so far, the present one up to `now_s`."""
        attempt = self._attempts.get(request.attempt_id)
        if attempt is None:
            return PhaseDurations(self._worker, {}, request.num_reused_tokens)
        present = self._present(request.attempt_id, attempt, now_s)
        seconds = dict(attempt.seconds)
        seconds[present.name] = seconds.get(present.name, 0.0) + present.ended_s - present.began_s
        spans = tuple(
            PhaseSpan(each.name, now_s - each.began_s, each.ended_s - each.began_s, each.num_tokens)
            for each in (*attempt.ended, present)
            if each is not present or each.ended_s > each.began_s
        )
        return PhaseDurations(self._worker, seconds, request.num_reused_tokens, spans)

    def present(self, now_s: float) -> list[Stretch]:
        """What goes on now. From any thread."""
        return [self._present(attempt_id, attempt, now_s) for attempt_id, attempt in self._attempts.copy().items()]

    def forget(self, attempt_id: AttemptId, now_s: float) -> None:
        """The attempt has ended here."""
        attempt = self._attempts.pop(attempt_id, None)
        if attempt is not None:
            self._history.on_stretch(self._present(attempt_id, attempt, now_s))

    def _end_phase(self, attempt_id: AttemptId, attempt: _Attempt, now_s: float) -> None:
        ended = self._present(attempt_id, attempt, now_s)
        attempt.seconds[ended.name] = attempt.seconds.get(ended.name, 0.0) + now_s - ended.began_s
        self._keep(attempt, ended)

    def _keep(self, attempt: _Attempt, ended: Stretch) -> None:
        if len(attempt.ended) < _MAX_SPANS:
            attempt.ended.append(ended)
        self._history.on_stretch(ended)

    @staticmethod
    def _present(attempt_id: AttemptId, attempt: _Attempt, now_s: float) -> Stretch:
        return Stretch(attempt.phase, attempt.uid, attempt_id, attempt.since_s, now_s)
