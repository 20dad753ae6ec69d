"""A step on the native kernels: checks a `StepBatch` and lays it out for one native call.

The counterpart of `plan.py` and `model.py`, which do the same with torch.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from manager import LayerGroupId
from serving.engine.batch import SequenceRows, StepBatch
from serving.engine.plan import PlannedGroup
from serving.engine.row_logits import LogitsOf
from serving.engine.visibility import Visibility
from serving.kernels.binding import NativeLibrary
from serving.kernels.native_model import NativeModel, NativePool, NativeStep
from serving.kernels.packed_weights import PackedWeights


class NativeForward:
    """The forward pass of one model over one set of pools."""

    def __init__(
        self,
        library: NativeLibrary,
        weights: PackedWeights,
        pools: Mapping[LayerGroupId, torch.Tensor],
        layer_places: Sequence[tuple[LayerGroupId, int]],
        layer_groups: Mapping[LayerGroupId, PlannedGroup],
    ) -> None:
        """Keep the pools, which fit the model; `layer_places` has each layer's group and its index there."""
        self._layer_groups = dict(layer_groups)
        order = {group: n for n, group in enumerate(pools)}
        self._model = NativeModel(
            library,
            weights,
            [_native_pool(pool, layer_groups[group].visibility) for group, pool in pools.items()],
            [(order[group], index) for group, index in layer_places],
        )

    def run(self, batch: StepBatch, rows: Sequence[int]) -> LogitsOf:
        """Write the batch's keys and values into their pages.

        Args:
            batch: one step.
            rows: those of which logits may be asked; all of them are worked out.

        Returns:
            The way to their logits.

        Raises:
            ValueError: no rows, a sequence without rows, or a position that has no page; nothing was written.
            MemoryError: there is no memory for the batch's rows.
        """
        sequences = batch.sequences
        if not sequences:
            msg = "a step needs at least one row"
            raise ValueError(msg)
        for sequence in sequences:
            self._check(sequence)
        first_rows = np.cumsum([0, *(len(s.token_ids) for s in sequences)], dtype=np.int32)
        tables = [[_as_int32(s.block_tables[group]) for s in sequences] for group in self._layer_groups]
        step = NativeStep(
            token_ids=_as_int32(np.concatenate([s.token_ids for s in sequences])),
            first_rows=first_rows,
            starts=np.array([s.start for s in sequences], np.int32),
            block_tables=[np.concatenate(of_group) for of_group in tables],
            table_offsets=[
                np.cumsum([0, *(len(table) for table in of_group[:-1])], dtype=np.int32) for of_group in tables
            ],
            drawn_rows=np.array(rows, np.int32),
        )
        logits = self._model.forward(step, torch.get_num_threads())
        wanted = list(rows)
        places = {row: place for place, row in enumerate(wanted)}

        def logits_of(picked: Sequence[int]) -> torch.Tensor:
            if list(picked) == wanted:
                return logits  # all of them: the usual step, which scores no prompt
            return logits[[places[row] for row in picked]]

        return logits_of

    def _check(self, sequence: SequenceRows) -> None:
        end = sequence.start + len(sequence.token_ids)
        if end == sequence.start:
            msg = f"{sequence.request_id}: no rows"
            raise ValueError(msg)
        for group, planned in self._layer_groups.items():
            layout = planned.layout
            num_blocks = -(-end // layout.tokens_per_block)
            table = sequence.block_tables[group]
            if len(table) < num_blocks:
                msg = (
                    f"{sequence.request_id}: positions up to {end} need {num_blocks} blocks, the table has {len(table)}"
                )
                raise ValueError(msg)
            needed = table[planned.visibility.runs(sequence.start, end, layout.tokens_per_block)]
            if needed.min() < 0 or needed.max() >= layout.num_slots:
                msg = f"{sequence.request_id}: a slot of layer group {group} is outside [0, {layout.num_slots})"
                raise ValueError(msg)


def _native_pool(pool: torch.Tensor, visibility: Visibility) -> NativePool:
    return NativePool(pool, window=visibility.window or 0, sink_tokens=visibility.num_sink_tokens)


def _as_int32(array: npt.NDArray[np.int64] | npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    return np.ascontiguousarray(array, np.int32)
