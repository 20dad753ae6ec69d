"""Draws tokens (E2): argmax over the filtered vocabulary of logit / temperature + Gumbel noise.

A draw is a pure function of a row's logits and its `SamplingKey`: rows are drawn one by one, each by the
same operations on the same shapes, so that the batch cannot matter. All arithmetic after the logits is
float64.
"""

import math
from collections.abc import Sequence
from itertools import zip_longest

import torch

from serving.engine.batch import SamplingKey
from serving.engine.logit_rules import LogitRules
from serving.engine.noise import gumbel_noise
from serving.engine.ranking import log_sum_exp, ranked

_RANKS = (256, 4096)
"""Tokens that are ranked before all of them are: nearly every top_p is reached among these."""


class NonFiniteLogitsError(ArithmeticError):
    """The model's output holds no largest number: damaged weights or pages. Nothing may be drawn (I7)."""


def draw_tokens(
    logits: torch.Tensor, keys: Sequence[SamplingKey], rules: Sequence[LogitRules | None] = ()
) -> list[int]:
    """One token for each row.

    Args:
        logits: [num_rows, vocab_size] float32.
        keys: one for each row.
        rules: what to change in each row first; empty changes nothing.

    Raises:
        NonFiniteLogitsError: a row's largest logit is infinite or not a number.
    """
    tokens: list[int] = require_finite(logits).tolist()
    for row, (key, rule) in enumerate(zip_longest(keys, rules)):
        scores = logits[row] if rule is None else rule.apply(logits[row])
        if key.temperature > 0.0:
            tokens[row] = _draw(scores, key)
        elif rule is not None:
            tokens[row] = int(require_finite(scores[None])[0])
    return tokens


def require_finite(logits: torch.Tensor) -> torch.Tensor:
    """The ids [num_rows] of the rows' largest logits.

    Raises:
        NonFiniteLogitsError: one of these is infinite or not a number.
    """
    best, best_ids = logits.max(dim=-1)
    if not bool(best.isfinite().all()):
        rows = (~best.isfinite()).nonzero().flatten().tolist()
        msg = f"logits of rows {rows} of {len(logits)} are not finite"
        raise NonFiniteLogitsError(msg)
    return best_ids


def _draw(logits: torch.Tensor, key: SamplingKey) -> int:
    scaled = logits.to(torch.float64) / key.temperature
    token_ids = _kept_tokens(scaled, key)
    if token_ids is None:
        all_ids = torch.arange(len(scaled), device=scaled.device)
        return int((scaled + gumbel_noise(key, all_ids)).argmax())
    return int(token_ids[(scaled[token_ids] + gumbel_noise(key, token_ids)).argmax()])


def _kept_tokens(scaled: torch.Tensor, key: SamplingKey) -> torch.Tensor | None:
    """Ids that pass top_k, then top_p of what top_k left, then min_p; None when nothing filters."""
    token_ids: torch.Tensor | None = None
    if 0 < key.top_k < len(scaled):
        token_ids = ranked(scaled, key.top_k)[: key.top_k]
    if key.top_p < 1.0:
        token_ids = _nucleus(scaled, key.top_p) if token_ids is None else _cut(scaled, token_ids, key.top_p)
    if key.min_p > 0.0:
        threshold = scaled.max() + math.log(key.min_p)
        if token_ids is None:
            return (scaled >= threshold).nonzero().flatten()
        token_ids = token_ids[scaled[token_ids] >= threshold]
    return token_ids


def _nucleus(scaled: torch.Tensor, top_p: float) -> torch.Tensor:
    """The fewest best tokens whose probabilities reach `top_p` of the whole vocabulary's."""
    total = log_sum_exp(scaled)
    for at_least in (*_RANKS, len(scaled)):
        token_ids = ranked(scaled, at_least)
        reached = (scaled[token_ids] - total).exp().cumsum(-1)
        if reached[-1] >= top_p:
            break
    return token_ids[: int((reached < top_p).sum()) + 1]


def _cut(scaled: torch.Tensor, token_ids: torch.Tensor, top_p: float) -> torch.Tensor:
    """The fewest of `token_ids` (best first) whose probabilities reach `top_p` of their own sum."""
    kept = scaled[token_ids]
    reached = (kept - log_sum_exp(kept)).exp().cumsum(-1)
    return token_ids[: int((reached < top_p).sum()) + 1]
