"""Turns a committed plan into the rows of one step. The only place where requests become arrays."""

from collections.abc import Sequence

import numpy as np

from manager import KVCacheManager, LayerGroupId
from scheduler.output import SchedulerOutput
from scheduler.request import Request
from serving.engine.batch import SamplingKey, SequenceRows, StepBatch


class BatchBuilder:
    """Reads tokens from the requests and places from the manager."""

    def __init__(self, manager: KVCacheManager, layer_groups: Sequence[LayerGroupId]) -> None:
        """`layer_groups`: those of the model, each with its own block table."""
        self._manager = manager
        self._layer_groups = tuple(layer_groups)

    def build(self, output: SchedulerOutput) -> StepBatch:
        """Contexts first, then decodes, in the plan's order."""
        rows = [
            self._rows(chunk.request, chunk.start, chunk.num_tokens, draws=chunk.is_last) for chunk in output.contexts
        ]
        for request in output.generations:
            start = self._manager.history_length(request.request_id)
            rows.append(self._rows(request, start, len(request.token_ids) - start, draws=True))
        return StepBatch(rows)

    def _rows(self, request: Request, start: int, num_tokens: int, *, draws: bool) -> SequenceRows:
        return SequenceRows(
            request_id=request.request_id,
            token_ids=np.asarray(request.token_ids[start : start + num_tokens], dtype=np.int64),
            start=start,
            block_tables={group: self._manager.block_table(request.request_id, group) for group in self._layer_groups},
            sampling=_sampling_key(request) if draws else None,
        )


def _sampling_key(request: Request) -> SamplingKey:
    sampling = request.spec.sampling
    return SamplingKey(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        seed=sampling.seed,
        choice=sampling.choice,
        position=request.num_generated,
    )
