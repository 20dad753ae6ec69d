"""Samples as figures."""

import statistics
from collections.abc import Sequence
from typing import Any

from serving.bench.load.sample import Sample

_PERCENTILES = (50, 90, 99)
_PHASES = (("queued_s", "queue"), ("context_s", "prefill"), ("transfer_s", "transfer"))


def percentile(values: Sequence[float], q: float) -> float:
    """The nearest-rank percentile; NaN of nothing.

    Args:
        values: in any order.
        q: from 0 to 100.
    """
    if not values:
        return float("nan")
    return sorted(values)[min(len(values) - 1, int(q / 100 * len(values)))]


def summarize(samples: Sequence[Sample], elapsed_s: float) -> dict[str, Any]:
    """A JSON-ready object: percentiles in seconds, tokens per second, the shares of the time to first token."""
    num_tokens = sum(sample.num_tokens for sample in samples)
    num_prompt_tokens = sum(sample.prompt_tokens for sample in samples)
    return {
        "requests": len(samples),
        "elapsed_s": elapsed_s,
        "ttft_s": _percentiles([sample.first_token_s for sample in samples]),
        "itl_s": _percentiles([gap for sample in samples for gap in sample.gaps_s]),
        "e2e_s": _percentiles([sample.end_s for sample in samples]),
        "output_tok_s": num_tokens / elapsed_s,
        "total_tok_s": (num_tokens + num_prompt_tokens) / elapsed_s,
        "ttft_share": _shares(samples),
    }


def _percentiles(values: Sequence[float]) -> dict[str, float]:
    return {f"p{q}": percentile(values, q) for q in _PERCENTILES} if values else {}


def _shares(samples: Sequence[Sample]) -> dict[str, float]:
    """Of each phase in the mean time to first token; the transfer may come after it, beside it."""
    known = [sample for sample in samples if sample.phases_s]
    if not known:
        return {}
    mean_first_s = statistics.fmean(sample.first_token_s for sample in known)
    return {
        title: statistics.fmean(sample.phases_s.get(phase, 0.0) for sample in known) / mean_first_s
        for phase, title in _PHASES
    }
