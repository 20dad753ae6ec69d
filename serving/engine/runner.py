"""`Engine`: one step, from a batch of rows and block tables to drawn tokens.

Owns no pages: pools belong to the manager's side of the worker, block tables come with the batch.
"""

from collections.abc import Mapping, Sequence

import torch

from configs import ModelConfig
from manager import LayerGroupId, LayerId, RequestId
from scheduler.spec import TokenLogprobs
from serving.engine.attention import ProductRule
from serving.engine.batch import StepBatch, StepResult
from serving.engine.exactness import measure_attention, measure_linears
from serving.engine.linear import MAX_ROWS, RowRule
from serving.engine.model import LlamaModel
from serving.engine.paging import PageLayout
from serving.engine.plan import ITEM_TOKENS, BatchRules, PlannedGroup, StepPlanner
from serving.engine.ranking import token_logprobs
from serving.engine.sampler import draw_tokens, require_finite
from serving.engine.visibility import Visibility
from serving.engine.weights import ModelWeights

_HEAD_ROWS = 32
"""Rows of one call of the output head: the largest product of all, so measured only up to here."""
_ANY_BATCH = BatchRules(
    linear=RowRule(1, MAX_ROWS),
    head=RowRule(1, _HEAD_ROWS),
    attention=ProductRule(row_multiple=1, products_per_call=None),
)


class Engine:
    """A model on one device, over pools that somebody else manages. One thread calls it."""

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        pools: Mapping[LayerGroupId, torch.Tensor],
        *,
        layer_groups: Mapping[LayerGroupId, Sequence[LayerId]] | None = None,
        exact: bool = True,
    ) -> None:
        """Check the pools, and (when `exact`) measure which padding this machine's kernels need.

        Args:
            config: the model's geometry.
            weights: from `load_weights`.
            pools: per layer group, [num_slots, num_layers, 2, num_kv_heads, tokens_per_block, head_dim]
                on the device and in the format of the weights; each step writes into them.
            layer_groups: the layers of each group, in the order of its pool; may be left out when
                there is one group.
            exact: a row's logits are bit-identical whatever else is in the batch (E1). False skips
                the measurement and the padding.

        Raises:
            ValueError: a pool does not fit the model or the weights, or a group's layers differ in their windows.
            InexactKernelError: `exact`, and this machine's kernels cannot be made batch-invariant.
        """
        self._pools = dict(pools)
        self._config = config
        self._weights = weights
        self._layer_places = _layer_places(config, pools, layer_groups)
        planned = {
            group: PlannedGroup(_checked_layout(config, weights, pool), _visibility(config, group, self._layer_places))
            for group, pool in self._pools.items()
        }
        self.batch_rules = _measured_rules(config, weights) if exact else _ANY_BATCH
        heads_per_kv = config.num_heads // config.num_kv_heads
        self._planner = StepPlanner(planned, heads_per_kv, self.batch_rules, weights.device)
        self._model = LlamaModel(config, weights, self.batch_rules)

    @torch.inference_mode()
    def step(self, batch: StepBatch, *, return_logits: bool = False) -> StepResult:
        """Compute every row of `batch`, write its keys and values, draw one token per sequence that samples.

        May be called again with the same batch (a retried step): it writes the same bytes.

        Args:
            batch: at least one row; no two sequences share a page that either writes.
            return_logits: also return [num_drawn, vocab_size] float32, in the batch's order.

        Raises:
            ValueError: a position has no page or is past the model's context; nothing was written.
            NonFiniteLogitsError: the model's output is not a number; only private pages were written.
        """
        for sequence in batch.sequences:
            end = sequence.start + len(sequence.token_ids)
            if end > self._config.max_position:
                msg = f"{sequence.request_id}: position {end - 1} is past the context of {self._config.max_position}"
                raise ValueError(msg)
        plan = self._planner.plan(batch)
        hidden = self._model.forward(plan, self._pools, self._layer_places)
        prompt_logprobs = self._score_prompts(batch, hidden)
        drawing = [(s, s.sampling) for s in batch.sequences if s.sampling is not None]
        if not drawing:
            empty = torch.empty(0, self._config.vocab_size) if return_logits else None
            return StepResult(token_ids={}, logits=empty, prompt_logprobs=prompt_logprobs)
        logits = self._model.logits(hidden[plan.drawn_rows])[: len(drawing)]
        tokens = draw_tokens(logits, [key for _, key in drawing], [s.rules for s, _ in drawing])
        return StepResult(
            token_ids={s.request_id: token for (s, _), token in zip(drawing, tokens, strict=True)},
            logits=logits.cpu() if return_logits else None,
            logprobs={
                s.request_id: token_logprobs(row, token, s.num_logprobs)
                for (s, _), row, token in zip(drawing, logits, tokens, strict=True)
                if s.num_logprobs is not None
            },
            prompt_logprobs=prompt_logprobs,
        )

    def _score_prompts(self, batch: StepBatch, hidden: torch.Tensor) -> dict[RequestId, tuple[TokenLogprobs, ...]]:
        """Logprobs of prompt tokens, a few rows of logits at a time: those of a whole chunk are 100 MB."""
        scored: dict[RequestId, tuple[TokenLogprobs, ...]] = {}
        row, multiple = 0, self.batch_rules.head.multiple
        for sequence in batch.sequences:
            targets = sequence.scored_token_ids
            if targets is not None:
                found: list[TokenLogprobs] = []
                for first in range(0, len(targets), _HEAD_ROWS):
                    tokens = targets[first : first + _HEAD_ROWS].tolist()
                    rows = list(range(row + first, row + first + len(tokens)))
                    padding = [0] * (-len(rows) % multiple)
                    logits = self._model.logits(hidden[rows + padding])[: len(rows)]
                    require_finite(logits)
                    num_top = sequence.num_logprobs or 0
                    found += [token_logprobs(of, token, num_top) for of, token in zip(logits, tokens, strict=True)]
                scored[sequence.request_id] = tuple(found)
            row += len(sequence.token_ids)
        return scored


def _measured_rules(config: ModelConfig, weights: ModelWeights) -> BatchRules:
    of_layers = [linear for layer in weights.layers for linear in layer.linears()]
    item_rows = ITEM_TOKENS * config.num_heads // config.num_kv_heads
    return BatchRules(
        linear=measure_linears(of_layers, weights.dtype, weights.device, MAX_ROWS),
        head=measure_linears([weights.head], weights.dtype, weights.device, _HEAD_ROWS),
        attention=measure_attention(config.head_dim, item_rows, weights.device),
    )


def _layer_places(
    config: ModelConfig,
    pools: Mapping[LayerGroupId, torch.Tensor],
    layer_groups: Mapping[LayerGroupId, Sequence[LayerId]] | None,
) -> list[tuple[LayerGroupId, int]]:
    """For each layer, its group and its index in that group's pool."""
    if layer_groups is None:
        if len(pools) != 1:
            msg = f"{len(pools)} pools: layer_groups must say which layers each holds"
            raise ValueError(msg)
        layer_groups = {group: [LayerId(n) for n in range(config.num_layers)] for group in pools}
    places = {layer: (group, index) for group, layers in layer_groups.items() for index, layer in enumerate(layers)}
    if sorted(places) != list(range(config.num_layers)):
        msg = f"layer groups hold layers {sorted(places)}, the model has {config.num_layers}"
        raise ValueError(msg)
    for group, layers in layer_groups.items():
        if pools[group].shape[1] != len(layers):
            msg = f"the pool of layer group {group} has {pools[group].shape[1]} layers, the group {len(layers)}"
            raise ValueError(msg)
    return [places[LayerId(n)] for n in range(config.num_layers)]


def _visibility(config: ModelConfig, group: LayerGroupId, places: Sequence[tuple[LayerGroupId, int]]) -> Visibility:
    windows = {config.window_of(layer) for layer, (its_group, _) in enumerate(places) if its_group == group}
    if len(windows) != 1:
        msg = f"layer group {group} has layers of windows {windows}: a page would leave for some and stay for others"
        raise ValueError(msg)
    (window,) = windows
    return Visibility(window, 0 if window is None else config.num_sink_tokens)


def _checked_layout(config: ModelConfig, weights: ModelWeights, pool: torch.Tensor) -> PageLayout:
    layout = PageLayout.of(pool)
    found = (layout.num_kv_heads, layout.head_dim, pool.dtype, pool.device.type)
    expected = (config.num_kv_heads, config.head_dim, weights.dtype, weights.device.type)
    if found != expected:
        msg = f"pool has (kv_heads, head_dim, dtype, device) {found}, the model {expected}"
        raise ValueError(msg)
    return layout
