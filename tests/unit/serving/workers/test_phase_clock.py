"""Durations of an attempt's phases on one worker."""

from manager import WorkerName
from scheduler.durations import PhaseSpan
from scheduler.request import Request
from scheduler.spec import AttemptId, DoorName, RequestSpec, RequestUid, SamplingParams, StopParams
from scheduler.states import AttemptState
from serving.tracing.history import StepHistory
from serving.workers.phase_clock import PhaseClock

_ATTEMPT = AttemptId("1.1")
_UID = RequestUid("r")


def _request() -> Request:
    spec = RequestSpec(_UID, DoorName("d"), (5,), SamplingParams(), StopParams(max_tokens=1))
    return Request(spec, _ATTEMPT, AttemptState.CONTEXT_INIT, arrival=0, now_s=0.0)


def _clock(phase: str = "queue", now_s: float = 1.0, waited_s: float = 0.0) -> PhaseClock:
    clock = PhaseClock(WorkerName("w"), StepHistory())
    clock.admit(_ATTEMPT, _UID, phase, waited_s, now_s)
    return clock


def test_a_phase_lasts_until_the_next_begins() -> None:
    clock = _clock()
    clock.enter(_ATTEMPT, "context", 3.0)
    assert clock.durations(_request(), 3.5).phases == {"central": 0.0, "queue": 2.0, "context": 0.5}


def test_entering_the_present_phase_again_changes_nothing() -> None:
    clock = _clock("context")
    clock.enter(_ATTEMPT, "context", 2.0)
    assert clock.durations(_request(), 4.0).phases == {"central": 0.0, "context": 3.0}


def test_a_phase_that_comes_back_adds_up() -> None:
    clock = _clock("context", 0.0)
    for now_s, phase in enumerate(("context", "generation", "context")):
        clock.enter(_ATTEMPT, phase, float(now_s))
    assert clock.durations(_request(), 5.0).phases == {"central": 0.0, "context": 4.0, "generation": 1.0}


def test_the_wait_elsewhere_comes_first_and_chunks_lie_inside_their_phase() -> None:
    clock = _clock("queue", now_s=10.0, waited_s=4.0)
    clock.enter(_ATTEMPT, "context", 11.0)
    clock.chunk(_ATTEMPT, 7, 11.0, 12.0)
    assert clock.durations(_request(), 13.0).spans == (
        PhaseSpan("central", 7.0, 4.0),
        PhaseSpan("queue", 3.0, 1.0),
        PhaseSpan("chunk", 2.0, 1.0, 7),
        PhaseSpan("context", 2.0, 2.0),
    )


def test_the_spans_of_an_attempt_that_is_paused_again_and_again_are_bounded_and_its_sums_stay_right() -> None:
    clock = _clock("generation", 0.0)
    for now_s in range(1, 1001):
        clock.enter(_ATTEMPT, "paused" if now_s % 2 else "generation", float(now_s))
    found = clock.durations(_request(), 1000.0)
    assert len(found.spans) <= 129
    assert found.phases == {"central": 0.0, "generation": 500.0, "paused": 500.0}


def test_the_first_token_is_first_once_until_the_attempt_comes_again() -> None:
    clock = _clock()
    assert clock.is_first_token(_ATTEMPT)
    assert not clock.is_first_token(_ATTEMPT)
    clock.forget(_ATTEMPT, 2.0)
    clock.admit(_ATTEMPT, _UID, "offer", 0.0, 3.0)
    assert clock.is_first_token(_ATTEMPT)
