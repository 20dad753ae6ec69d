"""`PackedWeights`: a model as the native kernels read it, in one piece of memory, usually a file mapped read-only.

The place of each part follows from the model's geometry and the format alone, so that a file needs no index. Made
once beside the model; all workers of a host then map the same pages, and none copies or packs at start.
"""

import fcntl
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from configs import ModelConfig
from serving.kernels.packing import pack_gate_up, pack_matrix, pack_norm, padded

LAYOUT_VERSION = 1
"""Raised whenever the same weights are laid out otherwise; older files are then made anew."""
_HEADER_BYTES = 4096
_ALIGNMENT = 64

WeightReader = Callable[[str, tuple[int, ...]], torch.Tensor]
"""Gives the tensor of a name in a Llama checkpoint, checked to have the given shape."""


@dataclass(frozen=True, slots=True)
class PackedWeights:
    """All of a model.

    Attributes:
        dtype: format of the matrices and of the KV pages. Rows are float32 in either.
        memory: [num_bytes] uint8, aligned to 64; read-only.
        offsets: where each part begins.
    """

    config: ModelConfig
    dtype: torch.dtype
    memory: npt.NDArray[np.uint8]
    offsets: dict[str, int]

    @property
    def device(self) -> torch.device:
        """Always the CPU."""
        return torch.device("cpu")

    def address(self, part: str) -> int:
        """Where `part` is in this process."""
        return int(self.memory.ctypes.data) + self.offsets[part]


def can_pack(config: ModelConfig) -> bool:
    """Whether the native kernels cover this geometry: heads are whole vectors."""
    return config.head_dim % 8 == 0


def pack_in_memory(config: ModelConfig, read: WeightReader, dtype: torch.dtype) -> PackedWeights:
    """Pack into memory of this process. Raises what `read` raises."""
    offsets, num_bytes = _offsets(config, dtype)
    buffer = np.zeros(num_bytes + _ALIGNMENT, np.uint8)
    first = -int(buffer.ctypes.data) % _ALIGNMENT
    memory = buffer[first : first + num_bytes]
    _fill(memory, offsets, config, read, dtype)
    memory.flags.writeable = False
    return PackedWeights(config, dtype, memory, offsets)


def map_or_pack(
    folder: Path, fingerprint: str, config: ModelConfig, read: WeightReader, dtype: torch.dtype
) -> PackedWeights:
    """Map the packed file in `folder`; make it first where it is missing. One process at a time makes it.

    Where `folder` cannot be written, the weights are packed into this process's own memory.

    Args:
        folder: for packed files; made where it does not exist.
        fingerprint: of the model's folder.
        config: the model's geometry.
        read: gives its tensors; called only when packing.
        dtype: float32 or bfloat16.
    """
    offsets, num_bytes = _offsets(config, dtype)
    name = str(dtype).removeprefix("torch.")
    path = folder / f"{name}-{LAYOUT_VERSION}-{fingerprint[:16]}.packed"
    header = json.dumps(
        {"layout": LAYOUT_VERSION, "dtype": name, "fingerprint": fingerprint, "model": asdict(config)}, sort_keys=True
    ).encode()
    memory = _map(path, header, num_bytes)
    if memory is None:
        try:
            with _only_one(folder):
                memory = _map(path, header, num_bytes)
                if memory is None:
                    _write(path, header, num_bytes, lambda part: _fill(part, offsets, config, read, dtype))
                    memory = _map(path, header, num_bytes)
        except OSError:
            memory = None
    return pack_in_memory(config, read, dtype) if memory is None else PackedWeights(config, dtype, memory, offsets)


def _map(path: Path, header: bytes, num_bytes: int) -> npt.NDArray[np.uint8] | None:
    """The file's weights, or None where it is missing, cut short or of something else."""
    try:
        if path.stat().st_size != _HEADER_BYTES + num_bytes:
            return None
        whole = np.memmap(path, np.uint8, mode="r")
    except OSError:
        return None
    if whole[: len(header) + 1].tobytes() != header + b"\0":
        return None
    return whole[_HEADER_BYTES:]


def _write(path: Path, header: bytes, num_bytes: int, fill: Callable[[npt.NDArray[np.uint8]], None]) -> None:
    """Write beside `path`, then rename: nobody ever maps half a file."""
    partial = path.with_suffix(f".{os.getpid()}")
    try:
        with partial.open("wb") as file:
            # Reserves the blocks: on a full disk a write into a mapping would be a SIGBUS, this is an OSError.
            os.posix_fallocate(file.fileno(), 0, _HEADER_BYTES + num_bytes)
        whole = np.memmap(partial, np.uint8, mode="r+")
        whole[: len(header)] = np.frombuffer(header, np.uint8)
        fill(whole[_HEADER_BYTES:])
        whole.flush()
        partial.rename(path)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def _only_one(folder: Path) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _offsets(config: ModelConfig, dtype: torch.dtype) -> tuple[dict[str, int], int]:
    """Where each part begins, in the order in which a step reads them; and the size of all."""
    hidden, intermediate = config.hidden_size, padded(config.intermediate_size)
    q_size = config.num_heads * config.head_dim
    kv_size = config.num_kv_heads * config.head_dim
    matrices = {
        "qkv": (q_size + 2 * kv_size, hidden),
        "attention_out": (hidden, q_size),
        "gate_up": (2 * intermediate, hidden),
        "down": (hidden, config.intermediate_size),
    }
    sizes: dict[str, int] = {}
    for n in range(config.num_layers):
        sizes |= {f"{n}.{norm}": padded(hidden) * 4 for norm in ("attention_norm", "mlp_norm")}
        sizes |= {f"{n}.{name}": padded(out) * ins * dtype.itemsize for name, (out, ins) in matrices.items()}
    sizes["final_norm"] = padded(hidden) * 4
    sizes["embedding"] = padded(config.vocab_size) * hidden * dtype.itemsize
    if not config.tie_embeddings:
        sizes["head"] = sizes["embedding"]
    offsets, end = {}, 0
    for part, size in sizes.items():
        offsets[part] = end
        end += -(-size // _ALIGNMENT) * _ALIGNMENT
    if config.tie_embeddings:
        offsets["head"] = offsets["embedding"]
    return offsets, end


def _fill(
    memory: npt.NDArray[np.uint8],
    offsets: dict[str, int],
    config: ModelConfig,
    read: WeightReader,
    dtype: torch.dtype,
) -> None:
    for part, values in _packed_parts(config, read, dtype):
        as_bytes = values.contiguous().flatten().view(torch.uint8).numpy()
        memory[offsets[part] : offsets[part] + len(as_bytes)] = as_bytes


def _packed_parts(config: ModelConfig, read: WeightReader, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    hidden, intermediate = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    for n in range(config.num_layers):

        def layer(name: str, shape: tuple[int, ...], prefix: str = f"model.layers.{n}") -> torch.Tensor:
            return read(f"{prefix}.{name}.weight", shape)

        yield f"{n}.attention_norm", pack_norm(layer("input_layernorm", (hidden,)))
        yield f"{n}.mlp_norm", pack_norm(layer("post_attention_layernorm", (hidden,)))
        projections = [
            layer("self_attn.q_proj", (q_size, hidden)),
            layer("self_attn.k_proj", (kv_size, hidden)),
            layer("self_attn.v_proj", (kv_size, hidden)),
        ]
        yield f"{n}.qkv", pack_matrix(torch.cat(projections), dtype)
        yield f"{n}.attention_out", pack_matrix(layer("self_attn.o_proj", (hidden, q_size)), dtype)
        gate = layer("mlp.gate_proj", (intermediate, hidden))
        yield f"{n}.gate_up", pack_gate_up(gate, layer("mlp.up_proj", (intermediate, hidden)), dtype)
        yield f"{n}.down", pack_matrix(layer("mlp.down_proj", (hidden, intermediate)), dtype)
    yield "final_norm", pack_norm(read("model.norm.weight", (hidden,)))
    yield "embedding", pack_matrix(read("model.embed_tokens.weight", (config.vocab_size, hidden)), dtype)
    if not config.tie_embeddings:
        yield "head", pack_matrix(read("lm_head.weight", (config.vocab_size, hidden)), dtype)
