"""Seconds of a step."""

import numpy as np
import pytest

from manager import RequestId
from serving.engine.batch import SequenceRows, StepBatch
from serving.simulation.cost_model import CostModel

_COST = CostModel(
    step_s=10.0,
    context_token_s=1.0,
    context_attention_s=0.1,
    decode_row_s=2.0,
    kv_bytes_per_token=3,
    memory_bytes_per_s=6.0,
)


def _rows(start: int, num_tokens: int) -> SequenceRows:
    return SequenceRows(RequestId("r"), np.zeros(num_tokens, dtype=np.int64), start, {}, None)


def test_a_step_pays_its_weights_once_and_every_row_by_its_history() -> None:
    assert _COST.seconds(StepBatch([])) == 10.0
    # 4 tokens, which see 10 + 1, ..., 10 + 4 positions
    assert _COST.seconds(StepBatch([_rows(10, 4)])) == pytest.approx(10 + 4 + 0.1 * 50, abs=1e-12)
    assert _COST.seconds(StepBatch([_rows(8, 1), _rows(20, 1)])) == pytest.approx(10 + 2 * 2 + 28 * 3 / 6, abs=1e-12)
