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
from serving.engine.row_logits import LogitsOf
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

    def run(self, batch: StepBatch, rows: Sequence[int]) -> LogitsOf:
        """Write the batch's keys and values into their pages.

        Args:
            batch: one step.
            rows: those of which logits may be asked; any can be had here.

        Returns:
            The way to their logits.

        Raises:
            ValueError: no rows, a sequence without rows, or a position that has no page; nothing was written.
        """
        del rows
        hidden = self._model.forward(self._planner.plan(batch), self._pools, self._layer_places)
        multiple = self.batch_rules.head.multiple

        def logits_of(rows: Sequence[int]) -> torch.Tensor:
            if not rows:
                return torch.empty(0, self._vocab_size)
            padding = [0] * (-len(rows) % multiple)
            return self._model.logits(hidden[[*rows, *padding]])[: len(rows)]

        return logits_of


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
