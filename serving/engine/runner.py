"""`Engine`: one step, from a batch of rows and block tables to drawn tokens.

Owns no pages: pools belong to the manager's side of the worker, block tables come with the batch.
"""

from collections.abc import Mapping, Sequence

import torch

from configs import KernelSet, ModelConfig
from manager import LayerGroupId, LayerId
from serving.engine.batch import StepBatch, StepResult
from serving.engine.native_forward import NativeForward
from serving.engine.paging import PageLayout
from serving.engine.plan import PlannedGroup
from serving.engine.sampler import draw_tokens
from serving.engine.torch_forward import TorchForward
from serving.engine.visibility import Visibility
from serving.engine.weights import ModelWeights, takes_native
from serving.kernels.binding import NativeLibrary, load_library
from serving.kernels.packed_weights import PackedWeights


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
        logits = self._forward.logits(batch)
        drawing = [(s.request_id, s.sampling) for s in batch.sequences if s.sampling is not None]
        if not drawing:
            return StepResult(token_ids={}, logits=logits.cpu() if return_logits else None)
        tokens = draw_tokens(logits, [key for _, key in drawing])
        token_ids = {request_id: token for (request_id, _), token in zip(drawing, tokens, strict=True)}
        return StepResult(token_ids=token_ids, logits=logits.cpu() if return_logits else None)


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
