"""A step in torch: any device; what the native kernels do not cover, or where they were not built.

The counterpart of `native_forward.py`.
"""

from collections.abc import Mapping, Sequence

import torch

from configs import ModelConfig
from manager import LayerGroupId
from serving.engine.attention import ProductRule
from serving.engine.batch import StepBatch
from serving.engine.exactness import measure_attention, measure_linears
from serving.engine.linear import MAX_ROWS, RowRule
from serving.engine.model import LlamaModel
from serving.engine.plan import ITEM_TOKENS, BatchRules, PlannedGroup, StepPlanner
from serving.engine.weights import ModelWeights

_HEAD_ROWS = 32
"""Rows of one call of the output head: the largest product of all, so measured only up to here."""
_ANY_BATCH = BatchRules(
    linear=RowRule(1, MAX_ROWS),
    head=RowRule(1, _HEAD_ROWS),
    attention=ProductRule(row_multiple=1, products_per_call=None),
)


class TorchForward:
    """The forward pass of one model over one set of pools."""

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        pools: Mapping[LayerGroupId, torch.Tensor],
        layer_places: Sequence[tuple[LayerGroupId, int]],
        layer_groups: Mapping[LayerGroupId, PlannedGroup],
        *,
        exact: bool,
    ) -> None:
        """Measure (when `exact`) which padding this machine's kernels need.

        Raises:
            InexactKernelError: `exact`, and this machine's kernels cannot be made batch-invariant.
        """
        self._vocab_size = config.vocab_size
        self._pools = dict(pools)
        self._layer_places = list(layer_places)
        self.batch_rules = measured_rules(config, weights) if exact else _ANY_BATCH
        heads_per_kv = config.num_heads // config.num_kv_heads
        self._planner = StepPlanner(layer_groups, heads_per_kv, self.batch_rules, weights.device)
        self._model = LlamaModel(config, weights, self.batch_rules)

    def logits(self, batch: StepBatch) -> torch.Tensor:
        """Write the batch's keys and values into their pages; [num_drawn, vocab_size] float32 of the rows that draw.

        Raises:
            ValueError: no rows, a sequence without rows, or a position that has no page; nothing was written.
        """
        plan = self._planner.plan(batch)
        hidden = self._model.forward(plan, self._pools, self._layer_places)
        num_drawn = sum(sequence.sampling is not None for sequence in batch.sequences)
        if not num_drawn:
            return torch.empty(0, self._vocab_size)
        return self._model.logits(hidden[plan.drawn_rows])[:num_drawn]


def measured_rules(config: ModelConfig, weights: ModelWeights) -> BatchRules:
    """How rows must be batched on this machine (E1).

    Raises:
        InexactKernelError: nothing makes its kernels batch-invariant.
    """
    of_layers = [linear for layer in weights.layers for linear in layer.linears()]
    item_rows = ITEM_TOKENS * config.num_heads // config.num_kv_heads
    return BatchRules(
        linear=measure_linears(of_layers, weights.dtype, weights.device, MAX_ROWS),
        head=measure_linears([weights.head], weights.dtype, weights.device, _HEAD_ROWS),
        attention=measure_attention(config.head_dim, item_rows, weights.device),
    )
