"""`StepBatch`: what one forward pass computes, as plain values; and what it returns.

Knows requests only as rows of tokens with a place in the pools.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from manager import LayerGroupId, RequestId


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
class SequenceRows:
    """Consecutive positions of one sequence: a context chunk, or one decode token.

    Attributes:
        request_id: key of the result.
        token_ids: [num_tokens] int64; input tokens of positions [start, start + num_tokens).
        start: first position; KV of [0, start) is in the pages already.
        block_tables: per layer group, [num_blocks] int32 device slots, covering at least
            start + num_tokens positions; -1 where a page left the window.
        sampling: how to draw from the last row; None when the chunk is not the last.
    """

    request_id: RequestId
    token_ids: npt.NDArray[np.int64]
    start: int
    block_tables: Mapping[LayerGroupId, npt.NDArray[np.int32]]
    sampling: SamplingKey | None


@dataclass(frozen=True, slots=True)
class StepBatch:
    """All rows of one step."""

    sequences: Sequence[SequenceRows]


@dataclass(frozen=True, slots=True)
class StepResult:
    """Tokens drawn, by request; `logits` [num_drawn, vocab_size] float32 only when asked for."""

    token_ids: Mapping[RequestId, int]
    logits: torch.Tensor | None = None
