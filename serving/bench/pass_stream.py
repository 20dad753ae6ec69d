"""The request stream that two schedulers serve, and the loop that drives them alike.

Imports nothing of the project, since another engine's Python runs it, too. Requests keep a fixed number in flight:
whoever ends is replaced, so that a pass has decodes, some contexts, and some ends. Prompts share nothing.
"""

import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Protocol

TOKENS_PER_BLOCK = 16
MAX_NUM_TOKENS = 8192
_PROMPT_TOKENS = (128, 384)
_OUTPUT_TOKENS = (32, 96)
_TURNS = 4


@dataclass(frozen=True, slots=True)
class StreamRequest:
    """One request of the stream; its tokens count from `first_token`, and no two requests have one in common."""

    first_token: int
    prompt_tokens: int
    output_tokens: int

    @property
    def tokens(self) -> list[int]:
        """The prompt."""
        return list(range(self.first_token, self.first_token + self.prompt_tokens))


@dataclass(frozen=True, slots=True)
class StreamSeconds:
    """What a replay took, by phase, and its passes."""

    passes: int
    add_s: float
    plan_s: float
    complete_s: float

    @property
    def us_per_pass(self) -> float:
        """Microseconds of plan and complete."""
        return (self.plan_s + self.complete_s) / self.passes * 1e6

    @property
    def us_with_arrivals(self) -> float:
        """As `us_per_pass`, with what taking requests in costs; one of the two hashes prompts there."""
        return (self.add_s + self.plan_s + self.complete_s) / self.passes * 1e6


class StreamDriver(Protocol):
    """One scheduler with its manager; requests are named by their number."""

    def add(self, number: int) -> None:
        """It arrives."""
        ...

    def plan(self) -> None:
        """Decide a pass."""
        ...

    def prepare(self) -> None:
        """Make up what the step drew; not timed."""
        ...

    def complete(self) -> Sequence[int]:
        """Take the drawn tokens over, end who has enough; returns who has ended."""
        ...


def make_stream(running: int) -> list[StreamRequest]:
    """Four turns of `running` requests; equal for equal arguments."""
    random, stream, first = Random(running), [], 1
    for _ in range(_TURNS * running):
        request = StreamRequest(first, random.randint(*_PROMPT_TOKENS), random.randint(*_OUTPUT_TOKENS))
        stream.append(request)
        first += request.prompt_tokens
    return stream


def num_blocks(running: int) -> int:
    """Blocks that hold every request in flight, and half as many again."""
    return running * (_PROMPT_TOKENS[1] + _OUTPUT_TOKENS[1]) // TOKENS_PER_BLOCK * 3 // 2


def replay(driver: StreamDriver, num_requests: int, running: int) -> StreamSeconds:
    """Serve the stream with `running` requests in flight."""
    clock = time.perf_counter
    add_s = plan_s = complete_s = 0.0
    arrived = ended = passes = 0
    gc.collect()
    gc.freeze()  # A long-running server's collector has done with what was made before.
    try:
        while ended < num_requests:
            at_s = clock()
            while arrived < min(ended + running, num_requests):
                driver.add(arrived)
                arrived += 1
            planned_s = clock()
            add_s += planned_s - at_s
            driver.plan()
            plan_s += clock() - planned_s
            driver.prepare()
            drawn_s = clock()
            ended += len(driver.complete())
            complete_s += clock() - drawn_s
            passes += 1
    finally:
        gc.unfreeze()
    return StreamSeconds(passes, add_s, plan_s, complete_s)
