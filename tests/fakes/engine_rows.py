"""Feeds an engine by hand: block tables without a manager, sequences cut into chunks of any size."""

from collections.abc import Sequence

import numpy as np
import torch

from manager import LayerGroupId, RequestId
from serving.engine.batch import SamplingKey, SequenceRows, StepBatch
from serving.engine.runner import Engine

GROUP = LayerGroupId(0)
GREEDY = SamplingKey(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, choice=0, position=0)


class HandFedSequence:
    """Token ids of one sequence and the slots that its blocks live in."""

    def __init__(self, name: str, token_ids: Sequence[int], slots: Sequence[int]) -> None:
        """`slots` must cover all of `token_ids`; any order."""
        self.name = RequestId(name)
        self.token_ids = np.array(token_ids, dtype=np.int64)
        self.block_table = np.array(slots, dtype=np.int32)

    def rows(self, start: int, end: int, sampling: SamplingKey | None = GREEDY) -> SequenceRows:
        """Positions [start, end)."""
        return SequenceRows(self.name, self.token_ids[start:end], start, {GROUP: self.block_table}, sampling)


def run_in_chunks(engine: Engine, sequence: HandFedSequence, chunk: int, start: int = 0) -> torch.Tensor:
    """Logits [num_chunks, vocab_size] of the last position of every chunk of `sequence` from `start` on."""
    logits = []
    for first in range(start, len(sequence.token_ids), chunk):
        rows = sequence.rows(first, min(first + chunk, len(sequence.token_ids)))
        result = engine.step(StepBatch([rows]), return_logits=True)
        assert result.logits is not None
        logits.append(result.logits)
    return torch.cat(logits)
