"""Requests and when they come: from a trace in Mooncake's format, or random. A seed decides what the trace leaves open.

A line of a trace is `{"timestamp": ms, "input_length": tokens, "output_length": tokens, "hash_ids": [...]}`
with one id per 512 prompt tokens; equal ids are equal blocks. Lengths are divided by a scale, and a block of
id h becomes the tokens [h * size, (h + 1) * size), so that what was shared stays shared and nothing else is.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

HASHED_TOKENS = 512
"""Prompt tokens that one hash id of a trace stands for."""


class TraceError(ValueError):
    """A trace cannot be read; the message names the file and the line."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request.

    Attributes:
        at_s: virtual seconds.
        prompt_token_ids: at least one.
        output_length: tokens that it will draw, at least one.
    """

    at_s: float
    prompt_token_ids: tuple[int, ...]
    output_length: int


@dataclass(frozen=True, slots=True)
class TraceScale:
    """How a trace is made to fit a deployment.

    Attributes:
        length: lengths are divided by this; a power of two up to 512.
        output: output lengths are divided by this instead; 0 for the same.
        speed: arrivals come this much faster.
        tick_s: the trace's own clock counts in steps of this; the seed draws each arrival's place in its step.
    """

    length: int = 16
    output: int = 0
    speed: float = 1.0
    tick_s: float = 3.0

    def __post_init__(self) -> None:
        """Refuse scales that would cut a hashed block in two unequal parts."""
        if self.length < 1 or HASHED_TOKENS % self.length:
            msg = f"a length scale must divide {HASHED_TOKENS}, got {self.length}"
            raise ValueError(msg)
        if self.speed <= 0 or self.tick_s < 0 or self.output < 0:
            msg = f"speed={self.speed} must be positive, tick_s={self.tick_s} and output={self.output} not negative"
            raise ValueError(msg)


def read_trace(path: Path, scale: TraceScale, seed: int, max_requests: int | None = None) -> list[Arrival]:
    """Read the first `max_requests` lines, in order of arrival.

    Raises:
        FileNotFoundError: there is no such file.
        TraceError: a line is not of the format.
    """
    random = Random(f"arrivals {seed}")
    arrivals: list[Arrival] = []
    with path.open() as lines:
        for number, line in enumerate(lines, start=1):
            if max_requests is not None and len(arrivals) >= max_requests:
                break
            try:
                arrivals.append(_arrival(json.loads(line), scale, random))
            except (KeyError, TypeError, ValueError) as error:
                msg = f"{path}, line {number}: {type(error).__name__}: {error}"
                raise TraceError(msg) from error
    return sorted(arrivals, key=lambda arrival: arrival.at_s)


def _arrival(entry: dict[str, object], scale: TraceScale, random: Random) -> Arrival:
    milliseconds, hash_ids = entry["timestamp"], entry["hash_ids"]
    input_length, output_length = entry["input_length"], entry["output_length"]
    if not (isinstance(milliseconds, int | float) and isinstance(hash_ids, list)):
        msg = "timestamp is no number or hash_ids no list"
        raise TypeError(msg)
    if not (isinstance(input_length, int) and isinstance(output_length, int)):
        msg = "input_length and output_length are whole numbers"
        raise TypeError(msg)
    size = HASHED_TOKENS // scale.length
    num_tokens = max(1, -(-input_length // scale.length))
    if len(hash_ids) * size < num_tokens:
        msg = f"{len(hash_ids)} hash_ids do not cover input_length={input_length}"
        raise ValueError(msg)
    tokens = [token for block in hash_ids for token in range(block * size, (block + 1) * size)]
    at_s = (milliseconds / 1000 + random.random() * scale.tick_s) / scale.speed
    return Arrival(at_s, tuple(tokens[:num_tokens]), max(1, -(-output_length // (scale.output or scale.length))))


def random_arrivals(
    num_requests: int, rate_per_s: float, seed: int, mean_tokens: Sequence[int] = (256, 32)
) -> list[Arrival]:
    """Poisson arrivals with exponential lengths; a quarter of the prompts begin as an earlier one does.

    Args:
        num_requests: how many.
        rate_per_s: mean arrivals per virtual second.
        seed: everything is a function of these four.
        mean_tokens: of prompt and output.
    """
    random = Random(f"random arrivals {seed}")
    now_s, next_token = 0.0, 0
    arrivals: list[Arrival] = []
    for _ in range(num_requests):
        now_s += random.expovariate(rate_per_s)
        num_prompt, num_output = (1 + int(random.expovariate(1 / mean)) for mean in mean_tokens)
        shared: tuple[int, ...] = ()
        if arrivals and random.random() < 0.25:
            earlier = random.choice(arrivals).prompt_token_ids
            shared = earlier[: num_prompt - 1]
        fresh = range(next_token, next_token + num_prompt - len(shared))
        next_token = fresh.stop
        arrivals.append(Arrival(now_s, (*shared, *fresh), num_output))
    return arrivals
