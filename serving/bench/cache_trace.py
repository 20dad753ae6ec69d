"""The request trace that both cache managers replay, and the loop that drives them alike.

Imports nothing of the project, since another engine's Python runs it, too. Time is the processor's, which other
load lengthens least, and taken around whole phases of a step, so that the clock itself is not measured.
"""

import gc
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import log
from pathlib import Path
from random import Random
from typing import Protocol

TOKENS_PER_BLOCK = 16
SCALE = 16
"""Lengths of the trace are divided by this; a block of 512 tokens becomes one of 32."""
_TRACE_BLOCK = 512
_VOCABULARY = 49_000


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request: its prompt, and how many tokens it generates."""

    tokens: list[int]
    output_length: int


class CacheDriver(Protocol):
    """One cache manager behind the same five verbs; requests are named by their number."""

    def plan(self, running: Sequence[int], admitted: Sequence[int]) -> None:
        """Give every running request its next place and every admitted one all of its prompt's."""
        ...

    def complete(self, running: Sequence[int], admitted: Sequence[int]) -> None:
        """The step is done: one token for each."""
        ...

    def free(self, finished: Sequence[int]) -> None:
        """These requests have ended."""
        ...


@dataclass(slots=True)
class ReplayTimes:
    """What a replay took: seconds per phase, and operations (admits, grows, commits and frees)."""

    operations: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: {"plan": 0.0, "complete": 0.0, "free": 0.0})

    @property
    def us_per_operation(self) -> float:
        """Mean microseconds."""
        return sum(self.seconds.values()) / self.operations * 1e6


def load_trace(path: Path | None, count: int) -> list[TraceRequest]:
    """The first `count` requests, scaled; equal blocks of the trace are equal blocks of tokens. Made up without one."""
    if path is None:
        return make_trace(count)
    requests = []
    with path.open() as lines:
        for line, _ in zip(lines, range(count), strict=False):
            entry = json.loads(line)
            tokens = [token for block in entry["hash_ids"] for token in _block_tokens(block)]
            length = max(1, entry["input_length"] // SCALE)
            requests.append(TraceRequest(tokens[:length], max(1, entry["output_length"] // SCALE)))
    return requests


def make_trace(count: int, seed: int = 0) -> list[TraceRequest]:
    """Requests with the lengths of a chat service, for where no trace is at hand.

    Prompts are log-normal with the median (6,909) and mean (12,035) of the Mooncake conversation trace, outputs even
    around its mean (343); all begin with the same two blocks, and every twelfth continues an earlier one.
    """
    draw = Random(seed)
    requests: list[TraceRequest] = []
    for number in range(count):
        length = min(126_195, int(draw.lognormvariate(log(6_909), 1.05))) // SCALE + 1
        if number % 12 == 11:
            earlier = requests[draw.randrange(number)].tokens
            tokens = [*earlier[: length // 2 + 1], *(draw.randrange(_VOCABULARY) for _ in range(length))]
        else:
            tokens = [*range(2 * TOKENS_PER_BLOCK), *(draw.randrange(_VOCABULARY) for _ in range(length))]
        requests.append(TraceRequest(tokens[:length], draw.randint(1, 2 * 343 // SCALE)))
    return requests


def synthetic_prompt(num_tokens: int, seed: int) -> list[int]:
    """Tokens that no other seed shares a block with."""
    return [(seed * 1_000_003 + n * 104_729 + n * n % 8_191) % (1 << 30) % _VOCABULARY for n in range(num_tokens)]


def best_of(requests: Sequence[TraceRequest], make_driver: Callable[[], CacheDriver], repeats: int = 3) -> ReplayTimes:
    """The fastest of several replays, each on a new manager, with the collector frozen."""
    runs = []
    for _ in range(repeats):
        driver = make_driver()
        gc.collect()
        gc.freeze()
        runs.append(replay(requests, driver))
        gc.unfreeze()
    return min(runs, key=lambda times: times.us_per_operation)


def replay(requests: Sequence[TraceRequest], driver: CacheDriver, batch_size: int = 64) -> ReplayTimes:
    """Run all requests, `batch_size` at a time, one admission a step."""
    times = ReplayTimes()
    waiting = list(range(len(requests) - 1, -1, -1))
    left: dict[int, int] = {}
    while waiting or left:
        running = list(left)
        admitted = [waiting.pop()] if waiting and len(left) < batch_size else []
        start = time.process_time()
        driver.plan(running, admitted)
        planned = time.process_time()
        driver.complete(running, admitted)
        completed = time.process_time()
        for number in admitted:
            left[number] = requests[number].output_length
        for number in left:
            left[number] -= 1
        finished = [number for number, rest in left.items() if rest == 0]
        for number in finished:
            del left[number]
        before_free = time.process_time()
        driver.free(finished)
        times.seconds["free"] += time.process_time() - before_free
        times.seconds["plan"] += planned - start
        times.seconds["complete"] += completed - planned
        times.operations += 2 * (len(running) + len(admitted)) + len(finished)
    return times


def _block_tokens(hash_id: int) -> list[int]:
    size = _TRACE_BLOCK // SCALE
    return [(hash_id * 2_654_435_761 + n * 40_503) % _VOCABULARY for n in range(size)]
