"""`LogitRules`: what a request wants changed in its logits before its token is drawn.

A pure function of the row and the rules, in float64 and element by element, so that it keeps E1 and E2.
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

TokenIds = npt.NDArray[np.int64]


def _no_ids() -> TokenIds:
    return np.empty(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class LogitRules:
    """Changes of one row, applied in the order of the attributes.

    Attributes:
        repetition: divides positive and multiplies negative logits of `seen_ids`; 1 changes nothing.
        seen_ids: [num_seen] distinct tokens of prompt and output.
        presence: taken once from each of `generated_ids`.
        frequency: taken from each of `generated_ids` as often as it was generated.
        generated_ids: [num_generated] distinct tokens of the output.
        generated_counts: [num_generated] how often each was generated.
        bias_ids: [num_biased] tokens with a bias.
        bias: [num_biased] float64, added to them.
        allowed: [vocab_size] bool, what the grammar lets follow; None without one.
        forbidden_ids: [num_forbidden] tokens that may not be drawn, unless the grammar allows nothing else.
    """

    repetition: float = 1.0
    seen_ids: TokenIds = field(default_factory=_no_ids)
    presence: float = 0.0
    frequency: float = 0.0
    generated_ids: TokenIds = field(default_factory=_no_ids)
    generated_counts: TokenIds = field(default_factory=_no_ids)
    bias_ids: TokenIds = field(default_factory=_no_ids)
    bias: npt.NDArray[np.float64] | None = None
    allowed: npt.NDArray[np.bool_] | None = None
    forbidden_ids: TokenIds = field(default_factory=_no_ids)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """The changed row.

        Args:
            logits: [vocab_size], any format and device; not changed.

        Returns:
            [vocab_size] float64.
        """
        row = logits.to(torch.float64, copy=True)
        device = row.device
        if self.repetition != 1.0 and len(self.seen_ids):
            seen = torch.from_numpy(self.seen_ids).to(device)
            values = row[seen]
            row[seen] = torch.where(values > 0, values / self.repetition, values * self.repetition)
        if len(self.generated_ids):
            counts = torch.from_numpy(self.generated_counts).to(device, torch.float64)
            generated = torch.from_numpy(self.generated_ids).to(device)
            row[generated] = row[generated] - counts * self.frequency - self.presence
        if self.bias is not None:
            biased = torch.from_numpy(self.bias_ids).to(device)
            row[biased] = row[biased] + torch.from_numpy(self.bias).to(device)
        return self._restricted(row)

    def _restricted(self, row: torch.Tensor) -> torch.Tensor:
        if self.allowed is not None:
            allowed = torch.from_numpy(self.allowed).to(row.device)
            row = row.masked_fill(~allowed, -torch.inf)
        if not len(self.forbidden_ids):
            return row
        restricted = row.index_fill(0, torch.from_numpy(self.forbidden_ids).to(row.device), -torch.inf)
        return restricted if bool(restricted.max() > -torch.inf) else row
