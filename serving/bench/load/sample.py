"""What a client saw of one request."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class Sample:
    """One finished request; times in seconds since it was due.

    Counted from when the request should have been sent and not from when it was: a client or a server that
    falls behind must not hide the wait.

    Attributes:
        kind: the part of the workload it belongs to.
        arrivals_s: of each event with text; a server may put several tokens into one.
        phases_s: queue, prefill and transfer by the server's own account, where it has one.
    """

    kind: str
    prompt_tokens: int
    num_tokens: int
    arrivals_s: list[float]
    end_s: float
    phases_s: dict[str, float] = field(default_factory=dict)

    @property
    def first_token_s(self) -> float:
        """Time to the first token."""
        return self.arrivals_s[0]

    @property
    def gaps_s(self) -> list[float]:
        """Times between events."""
        return [later - earlier for earlier, later in zip(self.arrivals_s, self.arrivals_s[1:], strict=False)]

    @property
    def mean_gap_s(self) -> float:
        """Seconds per output token after the first; 0 for a single token."""
        return (self.arrivals_s[-1] - self.arrivals_s[0]) / max(1, self.num_tokens - 1)
