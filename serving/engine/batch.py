"""`StepBatch`: what one forward pass computes, as plain values; and what it returns.

Knows requests only as rows of tokens with a place in the pools.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from manager import LayerGroupId, RequestId
from scheduler.spec import TokenLogprobs
from serving.engine.logit_rules import LogitRules


@dataclass(frozen=True, slots=True)
class SamplingKey:
    """How to draw this sequence's token (E2); a pure function of these and the logits.

    Attributes:
        position: index of the drawn token among the request's generated tokens, from 0.
    """

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    choice: int
    position: int


@dataclass(frozen=True, slots=True)
class Draw:
    """One draw from a row's logits; see `SequenceRows` for the fields."""

    request_id: RequestId
    sampling: SamplingKey
    rules: LogitRules | None
    num_logprobs: int | None


@dataclass(frozen=True, slots=True)
class SequenceRows:
    """Consecutive positions of one sequence: a context chunk, or one decode token.

    Attributes:
        request_id: key of the result.
        token_ids: [num_tokens] int64; input tokens of positions [start, start + num_tokens).
        start: first position; KV of [0, start) is in the pages already.
        block_tables: per layer group, [num_blocks] int32 device slots, covering at least
            start + num_tokens positions; -1 where a page left the window.
        sampling: how to draw from the last row; None when the chunk is not the last.
        rules: what is changed in the logits before the draw; None draws from them as they are.
        num_logprobs: best tokens to report beside the drawn one and each scored one; None reports nothing.
        scored_token_ids: [num_scored] int64, num_scored <= num_tokens: what follows each of the first rows
            in the prompt; reported as `prompt_logprobs`. None where nobody asked.
        further_draws: draws of other requests from the last row's logits: choices of one prompt.
    """

    request_id: RequestId
    token_ids: npt.NDArray[np.int64]
    start: int
    block_tables: Mapping[LayerGroupId, npt.NDArray[np.int32]]
    sampling: SamplingKey | None
    num_logprobs: int | None = None
    scored_token_ids: npt.NDArray[np.int64] | None = None
    rules: LogitRules | None = None
    further_draws: tuple[Draw, ...] = ()

    def draws(self) -> tuple[Draw, ...]:
        """Everything that is drawn from the last row."""
        if self.sampling is None:
            return ()
        return (Draw(self.request_id, self.sampling, self.rules, self.num_logprobs), *self.further_draws)


@dataclass(frozen=True, slots=True)
class StepBatch:
    """All rows of one step."""

    sequences: Sequence[SequenceRows]


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step drew.

    Attributes:
        token_ids: by request, of those that drew.
        logits: [num_drawn, vocab_size] float32, only when asked for.
        logprobs: of the drawn tokens, of requests that want them.
        prompt_logprobs: of the scored tokens, of sequences that have any, in their order.
    """

    token_ids: Mapping[RequestId, int]
    logits: torch.Tensor | None = None
    logprobs: Mapping[RequestId, TokenLogprobs] = field(default_factory=dict)
    prompt_logprobs: Mapping[RequestId, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
