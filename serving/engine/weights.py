"""Loads a model's folder into the tensors that the engine computes with.

Query, key and value projections are one matrix, gate and up projections another: fewer, larger
products. Knows the names of a Llama checkpoint and which kernels the weights are for; knows nothing of pages
or batches.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from configs import DTypeName, KernelSet, ModelConfig
from serving.engine.errors import KernelsMissingError, ModelFileError
from serving.engine.linear import Linear, cpu_has_bfloat16, make_linear
from serving.engine.model_folder import load_model_config, model_fingerprint, weight_files
from serving.kernels.binding import load_library
from serving.kernels.packed_weights import PackedWeights, WeightReader, can_pack, map_or_pack, pack_in_memory

__all__ = [
    "LayerWeights",
    "ModelWeights",
    "PackedWeights",
    "load_model_config",
    "load_weights",
    "make_weights",
    "model_fingerprint",
    "resolve_dtype",
]

PACKED_FOLDER = "packed"
"""In a model's folder: its weights as the native kernels read them, one file per number format."""


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One transformer layer.

    Attributes:
        attention_norm: [hidden_size] float32.
        qkv: hidden_size -> (num_heads + 2 * num_kv_heads) * head_dim; queries, then keys, then values.
        attention_out: num_heads * head_dim -> hidden_size.
        mlp_norm: [hidden_size] float32.
        gate_up: hidden_size -> 2 * intermediate_size; gate, then up.
        down: intermediate_size -> hidden_size.
    """

    attention_norm: torch.Tensor
    qkv: Linear
    attention_out: Linear
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear

    def linears(self) -> tuple[Linear, Linear, Linear, Linear]:
        """All linear layers."""
        return self.qkv, self.attention_out, self.gate_up, self.down


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """All of a model.

    Attributes:
        dtype: format of the linear layers, their rows, and the KV pages.
        device: where everything is.
        embedding: [vocab_size, hidden_size] in `dtype`.
        layers: first to last.
        final_norm: [hidden_size] float32.
        head: hidden_size -> vocab_size.
    """

    dtype: torch.dtype
    device: torch.device
    embedding: torch.Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: torch.Tensor
    head: Linear


def resolve_dtype(name: DTypeName, device: str | torch.device) -> torch.dtype:
    """The number format for `device`; AUTO takes bfloat16 where the hardware multiplies it (E3)."""
    match name:
        case DTypeName.FLOAT32:
            return torch.float32
        case DTypeName.BFLOAT16:
            return torch.bfloat16
        case DTypeName.AUTO:
            is_cpu = torch.device(device).type == "cpu"
            has_bfloat16 = cpu_has_bfloat16() if is_cpu else torch.cuda.is_bf16_supported(including_emulation=False)
            return torch.bfloat16 if has_bfloat16 else torch.float32


def load_weights(
    folder: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: str | torch.device,
    kernels: KernelSet = KernelSet.AUTO,
) -> ModelWeights | PackedWeights:
    """The weights of `folder`, laid out for `kernels`.

    For the native ones a packed file beside the model is mapped, and made first where it is missing. For torch
    the safetensors files are read (mapped, a tensor at a time) and fused.

    Raises:
        ModelFileError: a file is damaged, or a tensor is missing or has an unexpected shape.
        KernelsMissingError: native kernels are asked for and cannot be had.
    """
    if takes_native(kernels, config, device):
        # Checked although a packed file may be there: a damaged model is an error on every start.
        read = _open_folder(folder)
        return map_or_pack(folder / PACKED_FOLDER, model_fingerprint(folder), config, read, dtype)
    return _build(config, _open_folder(folder), dtype, torch.device(device))


def takes_native(kernels: KernelSet, config: ModelConfig, device: str | torch.device) -> bool:
    """Whether weights for `kernels` are those of the native library.

    Raises:
        KernelsMissingError: native kernels are asked for and cannot be had.
    """
    if kernels is KernelSet.TORCH:
        return False
    has_native = torch.device(device).type == "cpu" and can_pack(config) and load_library() is not None
    if kernels is KernelSet.NATIVE and not has_native:
        raise KernelsMissingError(config.head_dim, str(device))
    return has_native


def _open_folder(folder: Path) -> WeightReader:
    files = weight_files(folder)
    location: dict[str, Path] = {}
    opened = {}
    try:
        for file in files:
            opened[file] = safe_open(file, framework="pt", device="cpu")
            location.update(dict.fromkeys(opened[file].keys(), file))  # type: ignore[no-untyped-call]
    except (SafetensorError, OSError) as error:
        raise ModelFileError(file, f"is damaged or not a safetensors file ({error})") from error

    def read(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        file = location.get(name)
        if file is None:
            raise ModelFileError(files[0], f"has no tensor {name!r}")
        tensor: torch.Tensor = opened[file].get_tensor(name)  # type: ignore[no-untyped-call]
        if tuple(tensor.shape) != shape:
            raise ModelFileError(file, f"tensor {name!r} has shape {tuple(tensor.shape)}, config.json says {shape}")
        return tensor

    return read


def make_weights(
    config: ModelConfig,
    tensors: Mapping[str, torch.Tensor],
    dtype: torch.dtype,
    device: str | torch.device,
    kernels: KernelSet = KernelSet.AUTO,
) -> ModelWeights | PackedWeights:
    """Lay out tensors that are already in memory, under the names of a Llama checkpoint.

    Raises:
        KeyError: a tensor is missing.
        ValueError: a tensor has an unexpected shape.
        KernelsMissingError: native kernels are asked for and cannot be had.
    """

    def read(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        tensor = tensors[name]
        if tuple(tensor.shape) != shape:
            msg = f"tensor {name!r} has shape {tuple(tensor.shape)}, expected {shape}"
            raise ValueError(msg)
        return tensor

    if takes_native(kernels, config, device):
        return pack_in_memory(config, read, dtype)
    return _build(config, read, dtype, torch.device(device))


def _build(config: ModelConfig, read: WeightReader, dtype: torch.dtype, device: torch.device) -> ModelWeights:
    vocab_by_hidden = (config.vocab_size, config.hidden_size)
    embedding = read("model.embed_tokens.weight", vocab_by_hidden).to(device, dtype)
    head = embedding if config.tie_embeddings else read("lm_head.weight", vocab_by_hidden).to(device, dtype)
    return ModelWeights(
        dtype=dtype,
        device=device,
        embedding=embedding,
        layers=tuple(_build_layer(config, n, read, dtype, device) for n in range(config.num_layers)),
        final_norm=read("model.norm.weight", (config.hidden_size,)).to(device, torch.float32),
        head=make_linear(head),
    )


def _build_layer(
    config: ModelConfig, number: int, read: WeightReader, dtype: torch.dtype, device: torch.device
) -> LayerWeights:
    prefix = f"model.layers.{number}"
    hidden, intermediate = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim

    def linear(shapes: Mapping[str, tuple[int, int]]) -> Linear:
        parts = [read(f"{prefix}.{name}.weight", shape) for name, shape in shapes.items()]
        return make_linear(torch.cat(parts).to(device, dtype))

    def norm(name: str) -> torch.Tensor:
        return read(f"{prefix}.{name}.weight", (hidden,)).to(device, torch.float32)

    return LayerWeights(
        attention_norm=norm("input_layernorm"),
        qkv=linear(
            {
                "self_attn.q_proj": (q_size, hidden),
                "self_attn.k_proj": (kv_size, hidden),
                "self_attn.v_proj": (kv_size, hidden),
            }
        ),
        attention_out=linear({"self_attn.o_proj": (hidden, q_size)}),
        mlp_norm=norm("post_attention_layernorm"),
        gate_up=linear({"mlp.gate_proj": (intermediate, hidden), "mlp.up_proj": (intermediate, hidden)}),
        down=linear({"mlp.down_proj": (hidden, intermediate)}),
    )
