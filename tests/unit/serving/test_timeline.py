"""Where the time of a request went."""

from typing import Any

from manager import WorkerName
from scheduler.durations import PhaseDurations
from scheduler.spec import AttemptId, RequestUid
from serving.timeline import ChoiceTimeline, RequestTimeline, StreamState, TimelineBook


def choice(index: int = 0) -> ChoiceTimeline:
    return ChoiceTimeline(RequestUid(f"r/{index}"), index, num_prompt_tokens=10, submitted_at_s=100.0)


def durations(worker: str, cached_tokens: int | None = None, **phases: float) -> PhaseDurations:
    return PhaseDurations(WorkerName(worker), phases, cached_tokens)


def test_a_workers_later_word_replaces_its_earlier_one_and_workers_add_up() -> None:
    timeline = choice()
    timeline.on_durations(AttemptId("1.1"), durations("context-0", context=1.0, queue=0.5), 102.0)
    timeline.on_durations(AttemptId("1.1"), durations("generation-0", transfer=0.25, offer=0.5, generation=1.0), 102.0)
    timeline.on_durations(AttemptId("1.1"), durations("generation-0", transfer=0.25, offer=0.5, generation=3.0), 102.0)
    timeline.on_durations(AttemptId("1.2"), durations("generation-0", context=0.5, generation=2.0), 102.0)
    timeline.on_tokens(1, 103.0)
    timeline.on_tokens(2, 104.0)
    timeline.on_end(StreamState.FINISHED, 107.0)
    timeline.on_end(StreamState.CANCELLED, 999.0)
    found: dict[str, Any] = timeline.to_json(2000.0)
    assert found["phases"] == {"queued_s": 1.5, "context_s": 1.5, "transfer_s": 0.75, "generation_s": 5.0}
    assert (found["time_to_first_token_s"], found["total_s"], found["state"]) == (3.0, 7.0, "finished")
    assert len(found["workers"]) == 3


def test_cached_tokens_are_those_of_the_first_computation_and_at_most_the_prompt() -> None:
    timeline = choice()
    timeline.on_durations(AttemptId("1.1"), durations("context-0", 99), 102.0)
    timeline.on_durations(AttemptId("1.2"), durations("context-1", 3), 102.0)
    assert timeline.cached_tokens == 10


def test_a_running_request_counts_its_time_so_far() -> None:
    found: dict[str, Any] = choice().to_json(104.0)
    assert (found["total_s"], found["time_to_first_token_s"], found["phases"]["queued_s"]) == (4.0, None, 4.0)


def _phases(timeline: ChoiceTimeline, now_s: float) -> dict[str, float]:
    found: dict[str, Any] = timeline.to_json(now_s)
    phases: dict[str, float] = found["phases"]
    if found["state"] == "running" and not found["recoveries"]:
        assert sum(phases.values()) == found["total_s"]
    return phases


def test_the_phases_of_a_running_request_add_up_to_its_time_so_far() -> None:
    timeline = choice()
    timeline.on_durations(AttemptId("1.1"), durations("context-0", context=1.0), 102.0)
    timeline.on_tokens(1, 102.0)
    assert _phases(timeline, 102.5) == {"queued_s": 1.0, "context_s": 1.0, "transfer_s": 0.5, "generation_s": 0.0}
    timeline.on_durations(AttemptId("1.1"), durations("generation-0", transfer=0.75, generation=0.25), 103.0)
    timeline.on_tokens(2, 103.0)
    assert _phases(timeline, 109.0) == {"queued_s": 1.0, "context_s": 1.0, "transfer_s": 0.75, "generation_s": 6.25}
    timeline.on_durations(AttemptId("1.1"), durations("generation-0", transfer=0.75, generation=6.5), 109.25)
    timeline.on_end(StreamState.FINISHED, 109.25)
    assert _phases(timeline, 999.0) == {"queued_s": 1.0, "context_s": 1.0, "transfer_s": 0.75, "generation_s": 6.5}


def test_a_stream_without_an_attempt_is_in_no_phase() -> None:
    timeline = choice()
    timeline.on_durations(AttemptId("1.1"), durations("mixed-0", context=2.0), 102.0)
    timeline.on_tokens(2, 103.0)
    timeline.on_lost(104.0)
    assert _phases(timeline, 109.0)["generation_s"] == 0.0


def test_a_request_is_in_the_worst_state_of_its_choices() -> None:
    choices = (choice(0), choice(1))
    timeline = RequestTimeline("r", choices)
    states = [timeline.state]
    for each, end in zip(choices, (StreamState.CANCELLED, StreamState.FINISHED), strict=True):
        each.on_end(end, 101.0)
        states.append(timeline.state)
    assert states == [StreamState.RUNNING, StreamState.RUNNING, StreamState.CANCELLED]


def test_the_book_forgets_the_oldest_ended_requests_and_never_a_running_one() -> None:
    book = TimelineBook(capacity=2)
    for number in range(5):
        book.open(RequestTimeline(str(number), (choice(),)))
    for number in (3, 1, 2, 2):
        book.close(str(number))
    assert [number for number in range(5) if book.get(str(number)) is None] == [3]
