"""Timelines: where the time of a request went, by phase, for GET /requests/{id}.

Workers measure phases as durations on their own clocks (M7); the door adds what only it can see: the
first token's and the end's distance from the submission. Finished timelines are kept in a bounded book.
"""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from manager import WorkerName
from scheduler.durations import PhaseDurations
from scheduler.spec import AttemptId, FinishReason, RequestUid
from serving.stream_gaps import Recovery
from serving.trace_context import TraceContext

_SLACK_S = 1e-6  # of sums of floating-point numbers


class StreamState(StrEnum):
    """Where a choice or a request is."""

    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class TimedSpan:
    """A stretch of an attempt, put on the door's clock when the worker's word came.

    Attributes:
        name: a phase of `PhaseDurations`, or `chunk`.
        process: who worked or waited.
        num_tokens: positions of a chunk.
    """

    name: str
    process: str
    attempt_id: AttemptId
    began_at_s: float
    lasted_s: float
    num_tokens: int

    def is_chunk_of(self, context: "TimedSpan") -> bool:
        """Whether it is a part of this context phase."""
        return (
            (self.name, context.name) == ("chunk", "context")
            and (self.process, self.attempt_id) == (context.process, context.attempt_id)
            # Both came with one message, so that they are on one clock.
            and context.began_at_s - _SLACK_S <= self.began_at_s <= context.began_at_s + context.lasted_s + _SLACK_S
        )


@dataclass(slots=True)
class ChoiceTimeline:
    """One choice. All times are seconds; `*_at_s` on the door's clock.

    Attributes:
        phases: what each worker last said of each attempt; a later word replaces an earlier one.
        cached_tokens: of the first computation of the prompt; never changes afterwards (C9).
        recoveries: one for each time that the stream stood still because its attempt was lost.
    """

    uid: RequestUid
    index: int
    num_prompt_tokens: int
    submitted_at_s: float
    state: StreamState = StreamState.RUNNING
    first_token_at_s: float | None = None
    last_token_at_s: float | None = None
    ended_at_s: float | None = None
    num_tokens: int = 0
    cached_tokens: int | None = None
    num_resubmissions: int = 0
    finish_reason: FinishReason | None = None
    error: str | None = None
    phases: dict[tuple[WorkerName, AttemptId], Mapping[str, float]] = field(default_factory=dict)
    _spans: dict[tuple[WorkerName, AttemptId], tuple[TimedSpan, ...]] = field(default_factory=dict)
    recoveries: list[Recovery] = field(default_factory=list)
    _told_at_s: float | None = None

    def on_durations(self, attempt_id: AttemptId, durations: PhaseDurations, now_s: float) -> None:
        """Take a worker's word."""
        self._told_at_s = now_s
        self.phases[durations.worker, attempt_id] = durations.phases
        self._spans[durations.worker, attempt_id] = tuple(
            TimedSpan(
                name=span.name,
                process="central" if span.name == "central" else durations.worker,
                attempt_id=attempt_id,
                began_at_s=now_s - span.began_s_ago,
                lasted_s=span.lasted_s,
                num_tokens=span.num_tokens,
            )
            for span in durations.spans
        )
        if self.cached_tokens is None and durations.cached_tokens is not None:
            self.cached_tokens = min(max(durations.cached_tokens, 0), self.num_prompt_tokens)

    def on_tokens(self, num_tokens: int, now_s: float) -> None:
        """The stream now has so many tokens."""
        if self.first_token_at_s is None and num_tokens:
            self.first_token_at_s = now_s
        self.last_token_at_s = now_s
        self.num_tokens = num_tokens

    def on_lost(self, now_s: float) -> None:
        """Its attempt was lost. Lost again before a token came, it is the same interruption still."""
        present = self.recoveries[-1] if self.recoveries else None
        if present is not None and present.resumed_at_s is None:
            present.num_losses += 1
            present.earlier = self._attempts()
            return
        last_at_s = self.submitted_at_s if self.last_token_at_s is None else self.last_token_at_s
        self.recoveries.append(Recovery(last_at_s, now_s, self._attempts()))

    def on_resubmitted(self, now_s: float) -> None:
        """The central scheduler has taken it again."""
        if self.recoveries and self.recoveries[-1].resumed_at_s is None:
            self.recoveries[-1].accepted_at_s = now_s

    def on_attempt_token(self, attempt_id: AttemptId, now_s: float) -> None:
        """This attempt has brought a token."""
        if self.recoveries:
            self.recoveries[-1].on_token(attempt_id, now_s)

    def on_end(self, state: StreamState, now_s: float) -> None:
        """The stream is over. Only the first end counts."""
        if self.state is StreamState.RUNNING:
            self.state = state
            self.ended_at_s = now_s

    def spans(self) -> list[TimedSpan]:
        """Of all attempts, by their beginnings."""
        return sorted((span for spans in self._spans.values() for span in spans), key=lambda span: span.began_at_s)

    def phase_s(self, name: str) -> float:
        """Seconds that all workers together spent in a phase."""
        return sum(phases.get(name, 0.0) for phases in self.phases.values())

    def until_first_token_s(self, now_s: float) -> float:
        """Seconds from the submission to the first token, or to the end or now when there is none."""
        ended_at_s = self.ended_at_s if self.first_token_at_s is None else self.first_token_at_s
        return (now_s if ended_at_s is None else ended_at_s) - self.submitted_at_s

    def queued_s(self, now_s: float) -> float:
        """All time before the first token in which nothing was computed."""
        return max(0.0, self.until_first_token_s(now_s) - self.phase_s("context"))

    def to_json(self, now_s: float) -> dict[str, object]:
        """Ready for JSON. What a worker has not told yet counts to the phase that runs."""
        untold_s = self._untold_s(now_s)
        is_decoding = self.num_tokens > 1  # the second token is the first of the generation phase
        return {
            "index": self.index,
            "uid": self.uid,
            "state": self.state,
            "finish_reason": self.finish_reason,
            "error": self.error,
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_tokens,
            "cached_tokens": self.cached_tokens,
            "resubmissions": self.num_resubmissions,
            "time_to_first_token_s": None if self.first_token_at_s is None else self.until_first_token_s(now_s),
            "total_s": (self.ended_at_s if self.ended_at_s is not None else now_s) - self.submitted_at_s,
            "phases": {
                "queued_s": self.queued_s(now_s),
                "context_s": self.phase_s("context"),
                "transfer_s": self.phase_s("offer") + self.phase_s("transfer") + (0.0 if is_decoding else untold_s),
                "generation_s": self.phase_s("generation") + (untold_s if is_decoding else 0.0),
            },
            "workers": [
                {"worker": worker, "attempt": attempt, "phases": dict(phases)}
                for (worker, attempt), phases in self.phases.items()
            ],
            "spans": [
                {
                    "name": span.name,
                    "process": span.process,
                    "attempt": span.attempt_id,
                    "began_s": span.began_at_s - self.submitted_at_s,
                    "lasted_s": span.lasted_s,
                    "tokens": span.num_tokens,
                }
                for span in self.spans()
            ],
            "recoveries": [recovery.to_json(self._phases_of(recovery.attempt_id)) for recovery in self.recoveries],
        }

    def _untold_s(self, now_s: float) -> float:
        """Since a worker's last word, while an attempt goes on; until the first token all of it is the queue's."""
        is_interrupted = bool(self.recoveries) and self.recoveries[-1].resumed_at_s is None
        if self.state is not StreamState.RUNNING or is_interrupted:
            return 0.0
        if self._told_at_s is None or self.first_token_at_s is None:
            return 0.0
        return now_s - self._told_at_s

    def _attempts(self) -> frozenset[AttemptId]:
        return frozenset(attempt for _, attempt in self.phases)

    def _phases_of(self, attempt_id: AttemptId | None) -> list[Mapping[str, float]]:
        return [phases for (_, attempt), phases in self.phases.items() if attempt == attempt_id]


@dataclass(frozen=True, slots=True)
class RequestTimeline:
    """One API request with its choices."""

    api_id: str
    choices: tuple[ChoiceTimeline, ...]
    trace: TraceContext | None = None

    @property
    def state(self) -> StreamState:
        """The worst of its choices' states."""
        states = {choice.state for choice in self.choices}
        for state in (StreamState.RUNNING, StreamState.FAILED, StreamState.CANCELLED):
            if state in states:
                return state
        return StreamState.FINISHED

    def to_json(self, now_s: float) -> dict[str, object]:
        """Ready for JSON."""
        return {
            "id": self.api_id,
            "object": "request.timeline",
            "trace_id": None if self.trace is None else self.trace.trace_id,
            "state": self.state,
            "choices": [choice.to_json(now_s) for choice in self.choices],
        }


class TimelineBook:
    """Timelines by API id: all that run, and the last `capacity` that ended."""

    def __init__(self, capacity: int) -> None:
        """Args.

        capacity: ended timelines to keep.
        """
        self._capacity = capacity
        self._running: dict[str, RequestTimeline] = {}
        self._ended: OrderedDict[str, RequestTimeline] = OrderedDict()

    def open(self, timeline: RequestTimeline) -> None:
        """A request was accepted."""
        self._running[timeline.api_id] = timeline

    def close(self, api_id: str) -> RequestTimeline | None:
        """A request has ended; returns its timeline the first time."""
        timeline = self._running.pop(api_id, None)
        if timeline is None:
            return None
        self._ended[api_id] = timeline
        while len(self._ended) > self._capacity:
            self._ended.popitem(last=False)
        return timeline

    def recent(self, limit: int) -> list[RequestTimeline]:
        """The newest that run, then the newest that ended, `limit` in all."""
        running = list(self._running.values())[::-1]
        return (running + list(self._ended.values())[::-1])[:limit]

    def get(self, api_id: str) -> RequestTimeline | None:
        """The timeline, or None when it is unknown or was forgotten."""
        return self._running.get(api_id) or self._ended.get(api_id)
