"""`NativeModel`: packed weights and pools as one native engine; a step is one call.

Knows addresses, not requests. One thread calls it.
"""

import ctypes
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from serving.kernels.binding import Layer, Matrix, Model, NativeLibrary, Pool, Step
from serving.kernels.packed_weights import PackedWeights
from serving.kernels.packing import padded

IntArray = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class NativePool:
    """One layer group's pages.

    Attributes:
        pages: [num_slots, num_layers, 2, num_kv_heads, tokens_per_block, head_dim], contiguous.
        window: a query sees the last `window` positions, its own among them; 0 for all.
        sink_tokens: with a window, a query also sees the first so many positions.
    """

    pages: torch.Tensor
    window: int = 0
    sink_tokens: int = 0


@dataclass(frozen=True, slots=True)
class NativeStep:
    """A step's rows, sequence after sequence; all int32 and contiguous.

    Attributes:
        token_ids: [num_rows].
        first_rows: [num_sequences + 1]; where each sequence's rows begin, and the end.
        starts: [num_sequences] position of its first row.
        block_tables: per pool, the sequences' slots one after another; -1 where a page left the window.
        table_offsets: per pool, [num_sequences] where each sequence's slots begin.
        drawn_rows: [num_drawn] rows whose logits are wanted.
    """

    token_ids: IntArray
    first_rows: IntArray
    starts: IntArray
    block_tables: Sequence[IntArray]
    table_offsets: Sequence[IntArray]
    drawn_rows: IntArray


class NativeModel:
    """Runs steps of one model over pools that somebody else manages."""

    def __init__(
        self,
        library: NativeLibrary,
        weights: PackedWeights,
        pools: Sequence[NativePool],
        layer_places: Sequence[tuple[int, int]],
    ) -> None:
        """Describe everything to the library.

        Args:
            library: from `load_library`.
            weights: kept.
            pools: kept; each step writes into them.
            layer_places: for each layer, which pool, and its index there.
        """
        config = weights.config
        self._library = library
        self._vocab_size = config.vocab_size
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        angles = torch.outer(
            torch.arange(config.max_position, dtype=torch.float32), 1.0 / (config.rope_theta**exponents)
        )
        # Kept for as long as the engine: it holds their addresses.
        self._kept = (weights, tuple(pools), angles.cos(), angles.sin())
        layers = (Layer * config.num_layers)(*_layers(weights, layer_places))
        described = (Pool * len(pools))(*(_pool(pool) for pool in pools))
        model = Model(
            is_bfloat16=int(weights.dtype is torch.bfloat16),
            num_layers=config.num_layers,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            num_pools=len(pools),
            rms_norm_eps=config.rms_norm_eps,
            embedding=Matrix(weights.address("embedding"), config.hidden_size, config.vocab_size),
            head=Matrix(weights.address("head"), config.hidden_size, config.vocab_size),
            final_norm=weights.address("final_norm"),
            cos=self._kept[2].data_ptr(),
            sin=self._kept[3].data_ptr(),
            layers=layers,
            pools=described,
        )
        self._engine = library.create(model)  # copies the descriptions
        weakref.finalize(self, library.destroy, self._engine)

    def forward(self, step: NativeStep, num_threads: int) -> torch.Tensor:
        """Write the step's keys and values into their pages; return [num_drawn, vocab_size] float32.

        Raises:
            MemoryError: there is no memory for the step's rows.
        """
        logits = torch.empty(len(step.drawn_rows), self._vocab_size)
        self._library.forward(
            self._engine,
            Step(
                num_rows=len(step.token_ids),
                num_sequences=len(step.starts),
                num_drawn=len(step.drawn_rows),
                num_threads=num_threads,
                token_ids=step.token_ids.ctypes.data,
                first_rows=step.first_rows.ctypes.data,
                starts=step.starts.ctypes.data,
                block_tables=_addresses(step.block_tables),
                table_offsets=_addresses(step.table_offsets),
                drawn_rows=step.drawn_rows.ctypes.data,
                logits=logits.data_ptr(),
            ),
        )
        return logits


def _addresses(arrays: Sequence[IntArray]) -> "ctypes.Array[ctypes.c_void_p]":
    return (ctypes.c_void_p * len(arrays))(*(array.ctypes.data for array in arrays))


def _pool(pool: NativePool) -> Pool:
    _, num_layers, _, _, tokens_per_block, _ = pool.pages.shape
    return Pool(pool.pages.data_ptr(), num_layers, tokens_per_block, pool.window, pool.sink_tokens)


def _layers(weights: PackedWeights, places: Sequence[tuple[int, int]]) -> list[Layer]:
    config = weights.config
    hidden, q_size = config.hidden_size, config.num_heads * config.head_dim
    kv_size = config.num_kv_heads * config.head_dim
    return [
        Layer(
            qkv=Matrix(weights.address(f"{n}.qkv"), hidden, q_size + 2 * kv_size),
            attention_out=Matrix(weights.address(f"{n}.attention_out"), q_size, hidden),
            gate_up=Matrix(weights.address(f"{n}.gate_up"), hidden, 2 * padded(config.intermediate_size)),
            down=Matrix(weights.address(f"{n}.down"), config.intermediate_size, hidden),
            attention_norm=weights.address(f"{n}.attention_norm"),
            mlp_norm=weights.address(f"{n}.mlp_norm"),
            group=group,
            layer_in_group=index,
        )
        for n, (group, index) in enumerate(places)
    ]
