"""`RecentLatencies`: the last latencies of one door, for exact percentiles of what happens now."""

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field

_KEPT = 2000


@dataclass(frozen=True, slots=True)
class RecentLatencies:
    """Bounded; the oldest make room.

    Attributes:
        first_token_s: from submission to the first token.
        inter_token_s: between two tokens of a stream.
    """

    first_token_s: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))
    inter_token_s: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))

    def to_json(self) -> dict[str, dict[str, float | None]]:
        """Percentiles in seconds, None before the first; ready for JSON."""
        return {"ttft_s": percentiles(self.first_token_s), "inter_token_s": percentiles(self.inter_token_s)}


def percentiles(values: Collection[float]) -> dict[str, float | None]:
    """p50, p90 and p99 by nearest rank."""
    ordered = sorted(values)
    if not ordered:
        return {"p50": None, "p90": None, "p99": None}
    last = len(ordered) - 1
    return {f"p{share}": ordered[round(last * share / 100)] for share in (50, 90, 99)}
