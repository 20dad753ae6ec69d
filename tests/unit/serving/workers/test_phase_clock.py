"""Durations of an attempt's phases on one worker."""

from manager import WorkerName
from scheduler.request import Request
from scheduler.spec import AttemptId, DoorName, RequestSpec, RequestUid, SamplingParams, StopParams
from scheduler.states import AttemptState
from serving.workers.phase_clock import PhaseClock

_ATTEMPT = AttemptId("1.1")


def _request() -> Request:
    spec = RequestSpec(RequestUid("r"), DoorName("d"), (5,), SamplingParams(), StopParams(max_tokens=1))
    return Request(spec, _ATTEMPT, AttemptState.CONTEXT_INIT, arrival=0, now_s=0.0)


def test_a_phase_lasts_until_the_next_begins() -> None:
    clock = PhaseClock(WorkerName("w"))
    clock.enter(_ATTEMPT, "queue", 1.0)
    clock.enter(_ATTEMPT, "context", 3.0)
    assert clock.durations(_request(), 3.5).phases == {"queue": 2.0, "context": 0.5}


def test_entering_the_present_phase_again_changes_nothing() -> None:
    clock = PhaseClock(WorkerName("w"))
    clock.enter(_ATTEMPT, "context", 1.0)
    clock.enter(_ATTEMPT, "context", 2.0)
    assert clock.durations(_request(), 4.0).phases == {"context": 3.0}


def test_a_phase_that_comes_back_adds_up() -> None:
    clock = PhaseClock(WorkerName("w"))
    for now_s, phase in enumerate(("context", "generation", "context")):
        clock.enter(_ATTEMPT, phase, float(now_s))
    assert clock.durations(_request(), 5.0).phases == {"context": 4.0, "generation": 1.0}


def test_the_first_token_is_first_once_until_the_attempt_is_forgotten() -> None:
    clock = PhaseClock(WorkerName("w"))
    assert clock.is_first_token(_ATTEMPT)
    assert not clock.is_first_token(_ATTEMPT)
    clock.forget(_ATTEMPT)
    assert clock.is_first_token(_ATTEMPT)
