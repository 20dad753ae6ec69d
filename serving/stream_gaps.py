"""`Recovery`: where the time between a stream's last token and its going on went, after a lost attempt (C7).

    last token      lost notice     accepted again      first token         second token
        │ ── silent ──► │ ── resubmit ──► │ ───── resume ─────► │ ── hand over ──► │
                                            central, queue, context   central, offer, transfer

What the new attempt waited, computed and transferred is its own timeline; the rest is what the failure itself cost.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from scheduler.spec import AttemptId

EXPLAINED_PHASES = ("central", "queue", "context", "offer", "transfer")
"""Of a worker's word on an attempt: waiting (at the central scheduler, too), computing the prompt, moving it."""


@dataclass(slots=True)
class Recovery:
    """One interruption of one stream. Times are seconds on the door's clock.

    Attributes:
        silent_from_s: the last token before it, or the submission.
        lost_at_s: when the door learnt of the loss.
        earlier: attempts that had told something by then; a late token of theirs is no recovery.
        num_losses: attempts that were lost before one brought a token again.
        accepted_at_s: when the central scheduler took the request again.
        attempt_id: brought the next token.
        resumed_at_s: when that came.
        handed_over_at_s: when the same attempt's second token came: only then both halves have worked.
    """

    silent_from_s: float
    lost_at_s: float
    earlier: frozenset[AttemptId] = frozenset()
    num_losses: int = 1
    accepted_at_s: float | None = None
    attempt_id: AttemptId | None = None
    resumed_at_s: float | None = None
    handed_over_at_s: float | None = None

    def on_token(self, attempt_id: AttemptId, now_s: float) -> None:
        """The stream has gained a token."""
        if attempt_id in self.earlier:
            return
        if self.attempt_id is None:
            self.attempt_id, self.resumed_at_s = attempt_id, now_s
        elif attempt_id == self.attempt_id and self.handed_over_at_s is None:
            self.handed_over_at_s = now_s

    def own_s(self, phases: Iterable[Mapping[str, float]]) -> float | None:
        """Seconds that nothing in the new attempt's timeline explains; None while the stream has not gone on.

        Args:
            phases: what each worker said of the attempt that brought the next token.
        """
        until_s = self.resumed_at_s if self.handed_over_at_s is None else self.handed_over_at_s
        if until_s is None:
            return None
        explained_s = sum(told.get(name, 0.0) for told in phases for name in EXPLAINED_PHASES)
        return max(0.0, until_s - self.silent_from_s - explained_s)

    def to_json(self, phases: Iterable[Mapping[str, float]]) -> dict[str, object]:
        """Ready for JSON."""
        return {
            "attempt": self.attempt_id,
            "losses": self.num_losses,
            "silent_s": self.lost_at_s - self.silent_from_s,
            "resubmit_s": _between(self.lost_at_s, self.accepted_at_s),
            "resume_s": _between(self.accepted_at_s, self.resumed_at_s),
            "hand_over_s": _between(self.resumed_at_s, self.handed_over_at_s),
            "own_s": self.own_s(phases),
        }


def _between(earlier_s: float | None, later_s: float | None) -> float | None:
    return None if earlier_s is None or later_s is None else later_s - earlier_s
