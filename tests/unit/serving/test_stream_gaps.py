"""Where the time of an interruption went."""

from typing import Any

import pytest

from manager import WorkerName
from scheduler.durations import PhaseDurations
from scheduler.spec import AttemptId, RequestUid
from serving.timeline import ChoiceTimeline

OLD, NEW, NEWER = AttemptId("1.1"), AttemptId("1.2"), AttemptId("1.3")


def tell(timeline: ChoiceTimeline, attempt: AttemptId, worker: str, **phases: float) -> None:
    timeline.on_durations(attempt, PhaseDurations(WorkerName(worker), phases), now_s=0.0)


def token(timeline: ChoiceTimeline, attempt: AttemptId, now_s: float) -> None:
    timeline.on_tokens(timeline.num_tokens + 1, now_s)
    timeline.on_attempt_token(attempt, now_s)


def interrupted() -> ChoiceTimeline:
    """Its second token came at 101, the loss was told at 101.5 and the resubmission accepted at 101.75."""
    timeline = ChoiceTimeline(RequestUid("r/0"), 0, num_prompt_tokens=10, submitted_at_s=100.0)
    tell(timeline, OLD, "context-0", context=0.5)
    token(timeline, OLD, 100.5)
    token(timeline, OLD, 101.0)
    timeline.on_lost(101.5)
    timeline.on_resubmitted(101.75)
    return timeline


def only(timeline: ChoiceTimeline) -> Any:
    recoveries: Any = timeline.to_json(200.0)["recoveries"]
    assert len(recoveries) == 1
    return recoveries[0]


def test_an_interruption_is_explained_by_the_wait_the_prefill_and_the_transfer_of_the_new_attempt_alone() -> None:
    timeline = interrupted()
    tell(timeline, NEW, "context-1", central=1.0, queue=0.25, context=0.5)
    token(timeline, NEW, 103.75)
    tell(timeline, NEW, "generation-0", offer=0.125, transfer=0.25, generation=7.0)
    token(timeline, NEW, 104.25)
    token(timeline, NEW, 150.0)
    assert only(timeline) == {
        "attempt": NEW,
        "losses": 1,
        "silent_s": 0.5,
        "resubmit_s": 0.25,
        "resume_s": 2.0,
        "hand_over_s": 0.5,
        "own_s": pytest.approx(3.25 - 2.125),
    }


def test_a_late_token_of_the_lost_attempt_does_not_end_the_interruption() -> None:
    timeline = interrupted()
    token(timeline, OLD, 102.0)
    assert only(timeline)["own_s"] is None
    token(timeline, NEW, 103.0)
    assert only(timeline)["attempt"] == NEW
    assert only(timeline)["own_s"] == 2.0


def test_an_attempt_that_is_lost_before_its_first_token_prolongs_the_interruption_and_explains_nothing() -> None:
    timeline = interrupted()
    timeline.on_lost(103.0)
    timeline.on_resubmitted(103.5)
    tell(timeline, NEWER, "context-1", context=0.5)
    token(timeline, NEWER, 104.5)
    assert only(timeline)["losses"] == 2
    assert only(timeline)["own_s"] == 3.0


def test_two_interruptions_are_told_apart() -> None:
    timeline = interrupted()
    tell(timeline, NEW, "context-1", context=0.5)
    token(timeline, NEW, 102.5)
    token(timeline, NEW, 102.75)
    timeline.on_lost(103.0)
    tell(timeline, NEWER, "context-1", context=0.25)
    token(timeline, NEWER, 104.0)
    recoveries: Any = timeline.to_json(200.0)["recoveries"]
    assert [recovery["own_s"] for recovery in recoveries] == [1.25, 1.0]


def test_a_stream_that_lost_no_attempt_has_no_recoveries() -> None:
    timeline = ChoiceTimeline(RequestUid("r/0"), 0, num_prompt_tokens=10, submitted_at_s=100.0)
    token(timeline, OLD, 101.0)
    assert timeline.to_json(200.0)["recoveries"] == []
