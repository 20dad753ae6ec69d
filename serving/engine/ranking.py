"""Orders a row's tokens, and measures how likely they are, alike on any number of threads.

Sums over a vocabulary split by threads would differ in their last bits; these run on one, in a fixed order.
"""

import numpy as np
import torch

from scheduler.spec import TokenLogprobs


def ranked(scores: torch.Tensor, at_least: int) -> torch.Tensor:
    """Ids of the `at_least` best tokens and all that tie with the last, best first, lower id first on ties.

    Args:
        scores: [vocab_size].
        at_least: 1 or more.
    """
    if at_least >= len(scores):
        return scores.sort(descending=True, stable=True).indices
    # topk alone may break a tie either way; every token at its threshold is taken and sorted by id.
    threshold = scores.topk(at_least).values[-1]
    token_ids = (scores >= threshold).nonzero().flatten()
    return token_ids[scores[token_ids].sort(descending=True, stable=True).indices]


def log_sum_exp(scores: torch.Tensor) -> float:
    """Natural logarithm of the sum of exp(scores); [num_tokens] float64, its largest finite."""
    values = scores.cpu().numpy()
    best = values.max()
    # numpy adds in pairs, in one order, on one thread.
    return float(best + np.log(np.exp(values - best).sum()))


def token_logprobs(logits: torch.Tensor, token_id: int, num_top: int) -> TokenLogprobs:
    """The logprob of one token, and of the best ones.

    Args:
        logits: [vocab_size] float32, as the model gave them; the largest is finite.
        token_id: the token.
        num_top: how many of the best to name.
    """
    scores = logits.to(torch.float64)
    total = log_sum_exp(scores)
    best = ranked(scores, num_top)[:num_top].tolist() if num_top else []
    values = scores[[token_id, *best]].tolist()
    return TokenLogprobs(
        values[0] - total, tuple((best_id, value - total) for best_id, value in zip(best, values[1:], strict=True))
    )
