"""`StepHistory`: what a worker did lately. Bounded, written without a message, read when somebody asks.

Every entry is a tuple of numbers and names on the worker's own clock, appended in the loop's thread: a microsecond or
two a step. `tell` may be called from any thread and tells durations only (M7).
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from scheduler.messages import WorkerRole
from scheduler.output import SchedulerOutput
from scheduler.spec import AttemptId, RequestUid

CAPACITY = 8192
"""Entries of each kind: steps of 10 ms fill it in 80 seconds."""


class StepRecord(NamedTuple):
    """One step. Times are seconds before the answer that carries it."""

    iteration: int
    began_s_ago: float
    lasted_s: float
    num_context_tokens: int
    num_contexts: int
    num_generations: int
    num_suspended: int
    num_recomputed: int
    num_resumed: int


class StretchRecord(NamedTuple):
    """One stretch of one attempt: a phase, or a chunk. Times as in `StepRecord`."""

    name: str
    uid: RequestUid
    attempt_id: AttemptId
    began_s_ago: float
    lasted_s: float
    num_tokens: int


@dataclass(frozen=True, slots=True)
class WorkerHistory:
    """What a process tells of itself.

    Attributes:
        process: its name.
        role: None for the central scheduler.
        events: (process, message, seconds ago) of what has no length: lives that began or ended.
    """

    process: str
    role: WorkerRole | None
    pid: int
    epoch: int
    steps: tuple[StepRecord, ...] = ()
    stretches: tuple[StretchRecord, ...] = ()
    events: tuple[tuple[str, str, float], ...] = ()


_Step = tuple[int, float, float, int, int, int, int, int, int]


class Stretch(NamedTuple):
    """As it is remembered; seconds on the worker's clock."""

    name: str
    uid: RequestUid
    attempt_id: AttemptId
    began_s: float
    ended_s: float
    num_tokens: int = 0


class StepHistory:
    """The last steps and stretches of one worker.

    Attributes:
        iteration: of the last pass.
        longest_step_s: so far.
    """

    def __init__(self, capacity: int = CAPACITY) -> None:
        """Empty.

        Args:
            capacity: entries of each kind.
        """
        self.iteration = 0
        self.longest_step_s = 0.0
        self._steps: deque[_Step] = deque(maxlen=capacity)
        self._stretches: deque[Stretch] = deque(maxlen=capacity)

    def on_step(self, output: SchedulerOutput, began_s: float, ended_s: float) -> None:
        """A step is over, well or not."""
        self.longest_step_s = max(self.longest_step_s, ended_s - began_s)
        num_context_tokens = sum(chunk.num_tokens for chunk in output.contexts)
        self._steps.append(
            (
                output.iteration, began_s, ended_s, num_context_tokens, len(output.contexts),
                len(output.generations), output.num_suspended, output.num_recomputed, output.num_resumed,
            )
        )  # fmt: skip

    def on_stretch(self, stretch: Stretch) -> None:
        """A stretch is over."""
        self._stretches.append(stretch)

    def tell(
        self, open_ones: Iterable[Stretch], now_s: float, seconds: float
    ) -> tuple[tuple[StepRecord, ...], tuple[StretchRecord, ...]]:
        """Steps and stretches that ended within the last `seconds`, and `open_ones`. From any thread."""
        steps = (
            StepRecord(iteration, now_s - began_s, ended_s - began_s, *counts)
            for iteration, began_s, ended_s, *counts in self._steps.copy()
            if now_s - ended_s <= seconds
        )
        stretches = (
            StretchRecord(
                each.name, each.uid, each.attempt_id,
                now_s - each.began_s, each.ended_s - each.began_s, each.num_tokens,
            )
            for each in (*self._stretches.copy(), *open_ones)
            if now_s - each.ended_s <= seconds
        )  # fmt: skip
        return tuple(steps), tuple(stretches)
