"""`Engine`: one step, from a batch of rows and block tables to drawn tokens.

Owns no pages: pools belong to the manager's side of the worker, block tables come with the batch.
"""

from collections.abc import Mapping, Sequence

import torch

from configs import KernelSet, ModelConfig
from manager import LayerGroupId, LayerId, RequestId
from scheduler.spec import TokenLogprobs
from serving.engine.batch import StepBatch, StepResult
from serving.engine.native_forward import NativeForward
from serving.engine.paging import PageLayout
from serving.engine.plan import PlannedGroup
from serving.engine.ranking import token_logprobs
from serving.engine.row_logits import LogitsOf
from serving.engine.sampler import draw_tokens, require_finite
from serving.engine.torch_forward import TorchForward
from serving.engine.visibility import Visibility
from serving.engine.weights import ModelWeights, takes_native
from serving.kernels.binding import NativeLibrary, load_library
from serving.kernels.packed_weights import PackedWeights

_SCORED_ROWS = 32
"""Rows of a prompt that are scored at a time."""


class Engine:
    """A model on one device, over pools that somebody else manages. One thread calls it."""

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights | PackedWeights,
        pools: Mapping[LayerGroupId, torch.Tensor],
        *,
        layer_groups: Mapping[LayerGroupId, Sequence[LayerId]] | None = None,
        exact: bool = True,
    ) -> None:
        """Check the pools, and (with torch, when `exact`) measure which padding this machine's kernels need.

        Args:
            config: the model's geometry.
            weights: from `load_weights`; they say which kernels run.
            pools: per layer group, [num_slots, num_layers, 2, num_kv_heads, tokens_per_block, head_dim]
                on the device and in the format of the weights; each step writes into them.
            layer_groups: the layers of each group, in the order of its pool; may be left out when
                there is one group.
            exact: a row's logits are bit-identical whatever else is in the batch (E1). False skips
                torch's measurement and padding; the native kernels are exact as they are.

        Raises:
            ValueError: a pool does not fit the model or the weights, or a group's layers differ in their windows.
            InexactKernelError: `exact`, and this machine's kernels cannot be made batch-invariant.
        """
        self._config = config
        places = _layer_places(config, pools, layer_groups)
        groups = {
            group: PlannedGroup(_checked_layout(config, weights, pool), _visibility(config, group, places))
            for group, pool in pools.items()
        }
        self._forward = _make_forward(config, weights, pools, places, groups, exact=exact)

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
        scored, drawn = _rows_with_logits(batch)
        logits_of = self._forward.run(batch, [*(row for rows in scored.values() for row in rows), *drawn])
        prompt_logprobs = _score_prompts(batch, scored, logits_of)
        drawing = [draw for sequence in batch.sequences for draw in sequence.draws()]
        if not drawing:
            empty = torch.empty(0, self._config.vocab_size) if return_logits else None
            return StepResult(token_ids={}, logits=empty, prompt_logprobs=prompt_logprobs)
        logits = logits_of(drawn)
        if len(drawing) > len(drawn):
            repeats = torch.tensor([len(s.draws()) for s in batch.sequences if s.sampling is not None])
            logits = logits.repeat_interleave(repeats.to(logits.device), dim=0)
        tokens = draw_tokens(logits, [draw.sampling for draw in drawing], [draw.rules for draw in drawing])
        return StepResult(
            token_ids={draw.request_id: token for draw, token in zip(drawing, tokens, strict=True)},
            logits=logits.cpu() if return_logits else None,
            logprobs={
                draw.request_id: token_logprobs(row, token, draw.num_logprobs)
                for draw, row, token in zip(drawing, logits, tokens, strict=True)
                if draw.num_logprobs is not None
            },
            prompt_logprobs=prompt_logprobs,
        )


def _rows_with_logits(batch: StepBatch) -> tuple[dict[RequestId, range], list[int]]:
    """By request the rows whose logits score its prompt; and the rows that draw, in the batch's order."""
    scored: dict[RequestId, range] = {}
    drawn: list[int] = []
    row = 0
    for sequence in batch.sequences:
        if sequence.scored_token_ids is not None:
            scored[sequence.request_id] = range(row, row + len(sequence.scored_token_ids))
        row += len(sequence.token_ids)
        if sequence.sampling is not None:
            drawn.append(row - 1)
    return scored, drawn


def _score_prompts(
    batch: StepBatch, scored: Mapping[RequestId, range], logits_of: LogitsOf
) -> dict[RequestId, tuple[TokenLogprobs, ...]]:
    """Logprobs of prompt tokens, a few rows at a time: a row of logits is 200 KB."""
    logprobs: dict[RequestId, tuple[TokenLogprobs, ...]] = {}
    for sequence in batch.sequences:
        targets, rows = sequence.scored_token_ids, scored.get(sequence.request_id)
        if targets is None or rows is None:
            continue
        found: list[TokenLogprobs] = []
        for first in range(0, len(targets), _SCORED_ROWS):
            tokens = targets[first : first + _SCORED_ROWS].tolist()
            logits = logits_of(rows[first : first + _SCORED_ROWS])
            require_finite(logits)
            num_top = sequence.num_logprobs or 0
            found += [token_logprobs(of, token, num_top) for of, token in zip(logits, tokens, strict=True)]
        logprobs[sequence.request_id] = tuple(found)
    return logprobs


def exactness_class(kernels: KernelSet, config: ModelConfig, device: str) -> str:
    """Names the arithmetic of an engine with these settings: pages may be exchanged only where it is the same.

    Raises:
        KernelsMissingError: native kernels are asked for and cannot be had.
    """
    if takes_native(kernels, config, device):
        return _library().exactness_class
    is_cpu = torch.device(device).type == "cpu"
    capability = torch.backends.cpu.get_cpu_capability() if is_cpu else torch.cuda.get_device_name()
    return f"torch-{torch.__version__}-{capability}"


def _make_forward(
    config: ModelConfig,
    weights: ModelWeights | PackedWeights,
    pools: Mapping[LayerGroupId, torch.Tensor],
    places: Sequence[tuple[LayerGroupId, int]],
    groups: Mapping[LayerGroupId, PlannedGroup],
    *,
    exact: bool,
) -> TorchForward | NativeForward:
    if isinstance(weights, PackedWeights):
        return NativeForward(_library(), weights, pools, places, groups)
    return TorchForward(config, weights, pools, places, groups, exact=exact)


def _library() -> NativeLibrary:
    library = load_library()
    if library is None:  # it was there when the weights were packed
        msg = "the native library has gone"
        raise RuntimeError(msg)
    return library


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


def _checked_layout(config: ModelConfig, weights: ModelWeights | PackedWeights, pool: torch.Tensor) -> PageLayout:
    layout = PageLayout.of(pool)
    found = (layout.num_kv_heads, layout.head_dim, pool.dtype, pool.device.type)
    expected = (config.num_kv_heads, config.head_dim, weights.dtype, weights.device.type)
    if found != expected:
        msg = f"pool has (kv_heads, head_dim, dtype, device) {found}, the model {expected}"
        raise ValueError(msg)
    return layout
