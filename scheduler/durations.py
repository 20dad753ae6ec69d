"""What a worker tells of the time that an attempt took on it: durations, never timestamps (M7)."""

from collections.abc import Mapping
from dataclasses import dataclass

from manager import WorkerName


@dataclass(frozen=True, slots=True)
class PhaseSpan:
    """One stretch of an attempt's time on a worker.

    Attributes:
        name: a phase, or `chunk`: one step of the context phase.
        began_s_ago: counted from when the message that carries it was made.
        lasted_s: to its end, or so far.
        num_tokens: positions that a chunk computed; 0 otherwise.
    """

    name: str
    began_s_ago: float
    lasted_s: float
    num_tokens: int = 0


@dataclass(frozen=True, slots=True)
class PhaseDurations:
    """Seconds that a worker measured on its own clock; never timestamps (M7).

    Attributes:
        phases: phase name (central, queue, context, offer, transfer, generation, paused) -> seconds so far;
            `central` is what the central scheduler said that the attempt had waited there.
        cached_tokens: prompt tokens found in this worker's cache, when it computed the prompt.
        spans: the same in order, with the chunks of the context; of very many, the first ones.
    """

    worker: WorkerName
    phases: Mapping[str, float]
    cached_tokens: int | None = None
    spans: tuple[PhaseSpan, ...] = ()
