"""Tokens per second of the engine alone, beside what this machine's memory and arithmetic allow.

Every batch size decodes at one context; the fraction of the bus is (weights + keys and values read) per second
over the measured read speed, the fraction of the peak is the operations of linear layers and causal attention
per second over the measured multiply-adds. Both ceilings need the native library.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from configs import DTypeName, KernelSet, ModelConfig
from manager import LayerGroupId, RequestId
from serving.engine.batch import SamplingKey, SequenceRows, StepBatch
from serving.engine.model_folder import load_model_config
from serving.engine.runner import Engine, exactness_class
from serving.engine.weights import load_weights, resolve_dtype
from serving.kernels.binding import load_library

_GROUP = LayerGroupId(0)
_GREEDY = SamplingKey(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, choice=0, position=0)
_TOKENS_PER_BLOCK = 32
_READ_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class EngineBench:
    """What to measure.

    Attributes:
        batch_sizes: sequences that decode in one step.
        context: their length before the step, in tokens.
        prefill: tokens of the prompt whose prefill is timed.
        rounds: repetitions; the median counts.
    """

    folder: Path
    batch_sizes: tuple[int, ...] = (1, 4, 16, 64)
    context: int = 128
    prefill: int = 512
    rounds: int = 5
    num_threads: int = 1


def run_engine_bench(
    bench: EngineBench, dtype_name: DTypeName, kernels: KernelSet, *, exact: bool
) -> dict[str, object]:
    """One row: an engine of this format, these kernels and this exactness."""
    torch.set_num_threads(bench.num_threads)
    model = load_model_config(bench.folder)
    dtype = resolve_dtype(dtype_name, "cpu")
    engine = _make_engine(bench, model, dtype, kernels, exact=exact)
    decode = {size: _decode_s(bench, engine, size) for size in bench.batch_sizes}
    prefill_s = _median_s(bench.rounds, lambda: engine.step(StepBatch([_rows("p", 0, bench.prefill, 0)])))
    row: dict[str, object] = {
        "dtype": str(dtype).removeprefix("torch."),
        "kernels": exactness_class(kernels, model, "cpu"),
        "exact": exact,
        "num_threads": bench.num_threads,
        "decode_tok_s": {str(size): size / seconds for size, seconds in decode.items()},
        "prefill_tok_s": bench.prefill / prefill_s,
    }
    ceilings = _ceilings(bench.num_threads)
    if ceilings is not None:
        row |= ceilings
        first = min(bench.batch_sizes)
        bytes_read = _weight_bytes(model, dtype) + first * bench.context * _kv_bytes(model, dtype)
        row["decode_bus_fraction"] = bytes_read / decode[first] / 1e9 / ceilings["read_gb_s"]
        row["prefill_peak_fraction"] = _prefill_flop(model, bench.prefill) / prefill_s / 1e9 / ceilings["peak_gflop_s"]
    return row


def _make_engine(
    bench: EngineBench, model: ModelConfig, dtype: torch.dtype, kernels: KernelSet, *, exact: bool
) -> Engine:
    weights = load_weights(bench.folder, model, dtype, "cpu", kernels)
    needed = max(max(bench.batch_sizes) * _blocks(bench.context + 1), _blocks(bench.prefill))
    pool = torch.zeros(needed, model.num_layers, 2, model.num_kv_heads, _TOKENS_PER_BLOCK, model.head_dim, dtype=dtype)
    return Engine(model, weights, {_GROUP: pool}, exact=exact)


def _blocks(num_tokens: int) -> int:
    return -(-num_tokens // _TOKENS_PER_BLOCK)


def _rows(name: str, start: int, end: int, first_slot: int) -> SequenceRows:
    token_ids = np.random.default_rng(0).integers(10, 250, end)[start:]
    table = np.arange(first_slot, first_slot + _blocks(end), dtype=np.int32)
    return SequenceRows(RequestId(name), token_ids, start, {_GROUP: table}, _GREEDY)


def _decode_s(bench: EngineBench, engine: Engine, size: int) -> float:
    """Seconds of a step in which `size` sequences decode; their contexts are computed first."""
    stride = _blocks(bench.context + 1)
    for n in range(size):
        engine.step(StepBatch([_rows(f"{n}", 0, bench.context, n * stride)]))
    batch = StepBatch([_rows(f"{n}", bench.context, bench.context + 1, n * stride) for n in range(size)])
    return _median_s(bench.rounds, lambda: engine.step(batch))


def _median_s(rounds: int, run: Callable[[], object]) -> float:
    run()  # the first one touches memory
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _ceilings(num_threads: int) -> dict[str, float] | None:
    library = load_library()
    if library is None:
        return None
    memory = np.ones(_READ_BYTES, np.uint8)
    return {
        "read_gb_s": library.read_gb_s(memory.ctypes.data, memory.size, num_threads),
        "peak_gflop_s": library.peak_gflop_s(num_threads),
    }


def _layer_parameters(model: ModelConfig) -> int:
    q_size, kv_size = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    of_layer = model.hidden_size * (2 * q_size + 2 * kv_size + 3 * model.intermediate_size)
    return model.num_layers * of_layer


def _weight_bytes(model: ModelConfig, dtype: torch.dtype) -> int:
    """What a decode step reads: all layers and the output head."""
    return (_layer_parameters(model) + model.vocab_size * model.hidden_size) * dtype.itemsize


def _kv_bytes(model: ModelConfig, dtype: torch.dtype) -> int:
    return 2 * model.num_layers * model.num_kv_heads * model.head_dim * dtype.itemsize


def _prefill_flop(model: ModelConfig, num_tokens: int) -> float:
    """Linear layers of all tokens, causal attention, and the head of the last token."""
    attention = 4 * model.num_layers * model.num_heads * model.head_dim * num_tokens * (num_tokens + 1) / 2
    head = 2 * model.vocab_size * model.hidden_size
    return 2.0 * _layer_parameters(model) * num_tokens + attention + head


def describe(row: Mapping[str, object]) -> str:
    """A row for a person."""
    decode = row["decode_tok_s"]
    assert isinstance(decode, dict)
    speeds = "  ".join(f"{size}: {speed:.1f}" for size, speed in decode.items())
    kind = f"{row['dtype']} {row['kernels']} exact={row['exact']}"
    text = f"{kind}: decode tok/s {speeds}; prefill {row['prefill_tok_s']:.0f}"
    if "read_gb_s" in row:
        text += (
            f"; {row['decode_bus_fraction']:.2f} of {row['read_gb_s']:.1f} GB/s, "
            f"{row['prefill_peak_fraction']:.2f} of {row['peak_gflop_s']:.0f} GFLOP/s"
        )
    return text
