"""Jobs: prompts of token ids, how many tokens to make, and when each is due. All from a seed.

Every prompt is random unless a trace says which blocks are shared, so that no server answers from its cache
what another has to compute.
"""

import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

_VOCABULARY = range(300, 40_000)  # ordinary words of any vocabulary of this size: no special tokens
_TRACE_BLOCK_TOKENS = 512  # of the published traces, before scaling


@dataclass(frozen=True, slots=True)
class Job:
    """One request to send.

    Attributes:
        due_s: after the start of the run; 0 in a closed loop, where it is due when a client is free.
    """

    token_ids: tuple[int, ...]
    max_tokens: int
    due_s: float = 0.0
    kind: str = "all"


@dataclass(frozen=True, slots=True)
class Lengths:
    """Uniform between two numbers of tokens, both included. Written `128` or `64:512`."""

    least: int
    most: int

    @classmethod
    def parse(cls, text: str) -> "Lengths":
        """From the command line. Raises ValueError naming what is wrong."""
        least, _, most = text.partition(":")
        lengths = cls(int(least), int(most or least))
        if not 1 <= lengths.least <= lengths.most:
            msg = f"lengths {text!r}: expected N or LEAST:MOST with 1 <= LEAST <= MOST"
            raise ValueError(msg)
        return lengths

    def draw(self, dice: random.Random) -> int:
        """One length."""
        return dice.randint(self.least, self.most)

    def __str__(self) -> str:
        return str(self.least) if self.least == self.most else f"{self.least}:{self.most}"


def closed_jobs(count: int, prompt: Lengths, output: Lengths, seed: int, kind: str = "all") -> list[Job]:
    """For a fixed number of clients that each send the next when the last is done."""
    return [_draw_job(seed, index, prompt, output, kind) for index in range(count)]


def poisson_jobs(count: int, rate: float, prompt: Lengths, output: Lengths, seed: int) -> list[Job]:
    """Independent arrivals, `rate` a second on average. The prompts do not depend on the rate."""
    dice = random.Random(seed)
    due_s, jobs = 0.0, []
    for job in closed_jobs(count, prompt, output, seed):
        jobs.append(Job(job.token_ids, job.max_tokens, due_s, job.kind))
        due_s += dice.expovariate(1.0) / rate
    return jobs


def long_prompt_jobs(seconds: float, every_s: float, prompt: int, output: int, seed: int) -> list[Job]:
    """A long prompt at regular times, kind `long`."""
    lengths = Lengths(prompt, prompt), Lengths(output, output)
    return [
        Job(job.token_ids, job.max_tokens, (index + 0.5) * every_s, "long")
        for index, job in enumerate(closed_jobs(int(seconds / every_s), *lengths, seed, "long"))
    ]


def trace_jobs(path: Path, count: int, scale: int, speed: float) -> list[Job]:
    """The first `count` requests of a trace with timestamp (ms), input_length, output_length and hash_ids.

    Args:
        path: one JSON object a line.
        count: requests.
        scale: lengths are divided by it; equal hash ids stay equal blocks.
        speed: arrivals come this many times as fast.
    """
    with path.open(encoding="utf-8") as lines:
        rows = [json.loads(line) for line, _ in zip(lines, range(count), strict=False)]
    block = _TRACE_BLOCK_TOKENS // scale
    return [
        Job(
            _shared_blocks(row["hash_ids"], block)[: max(1, row["input_length"] // scale)],
            max(1, row["output_length"] // scale),
            row["timestamp"] / 1000 / speed,
        )
        for row in rows
    ]


def _draw_job(seed: int, index: int, prompt: Lengths, output: Lengths, kind: str) -> Job:
    dice = random.Random(f"{seed}/{kind}/{index}")
    return Job(_draw_tokens(dice, prompt.draw(dice)), output.draw(dice), kind=kind)


def _draw_tokens(dice: random.Random, count: int) -> tuple[int, ...]:
    return tuple(dice.choices(_VOCABULARY, k=count))


def _shared_blocks(hash_ids: Sequence[int], block: int) -> tuple[int, ...]:
    blocks: Iterable[tuple[int, ...]] = (_draw_tokens(random.Random(f"block/{name}"), block) for name in hash_ids)
    return tuple(token for tokens in blocks for token in tokens)
