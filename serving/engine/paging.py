"""Where the keys and values of a step live in a pool: index arithmetic only, no arithmetic on data.

A pool is `[num_slots, num_layers, 2, num_kv_heads, tokens_per_block, head_dim]`, contiguous; index 2
is keys, then values. Attention reads tiles of `TILE_TOKENS` keys, whatever `tokens_per_block` is: a
*unit* is the longest run of tokens that divides both, so a tile is a whole number of units and so is
a block. The pool seen as rows of one unit has, for the first layer,

    unit row = ((((slot * num_layers + layer) * 2 + kv) * num_kv_heads + head) * units_per_block + unit

and a later layer is a constant further on.
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

TILE_TOKENS = 128
"""Keys of one attention tile. Part of the arithmetic: another number gives other bits."""


@dataclass(frozen=True, slots=True)
class PageLayout:
    """Shape of one layer group's pool, and the index arithmetic that follows from it."""

    num_slots: int
    num_layers: int
    num_kv_heads: int
    tokens_per_block: int
    head_dim: int

    @classmethod
    def of(cls, pool: torch.Tensor) -> "PageLayout":
        """The layout of a pool tensor.

        Raises:
            ValueError: not six dimensions with 2 in the third place, or not contiguous.
        """
        if pool.dim() != 6 or pool.shape[2] != 2 or not pool.is_contiguous():
            msg = f"a pool is contiguous [slots, layers, 2, kv_heads, tokens, head_dim]; got {tuple(pool.shape)}"
            raise ValueError(msg)
        num_slots, num_layers, _, num_kv_heads, tokens_per_block, head_dim = pool.shape
        return cls(num_slots, num_layers, num_kv_heads, tokens_per_block, head_dim)

    @property
    def unit_tokens(self) -> int:
        """Tokens of one unit."""
        return math.gcd(self.tokens_per_block, TILE_TOKENS)

    @property
    def units_per_block(self) -> int:
        """Units of one block of one head."""
        return self.tokens_per_block // self.unit_tokens

    @property
    def units_per_tile(self) -> int:
        """Units of one tile of one head."""
        return TILE_TOKENS // self.unit_tokens

    @property
    def unit_rows_per_kv(self) -> int:
        """Unit rows from the keys of a layer to its values."""
        return self.num_kv_heads * self.units_per_block

    def unit_rows(self, slots: npt.NDArray[np.int64], units: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Unit rows of head 0's keys in layer 0; head h is h * units_per_block further.

        Args:
            slots: of the blocks that the units are in.
            units: ordinals in their sequences; of the same shape, which is the result's too.
        """
        slot_stride = self.num_layers * 2 * self.unit_rows_per_kv
        return slots * slot_stride + units % self.units_per_block

    def token_rows(self, block_table: npt.NDArray[np.int32], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Token rows (runs of head_dim) of head 0's keys in layer 0 at `positions`; [num_positions]."""
        slots = block_table[positions // self.tokens_per_block].astype(np.int64)
        slot_stride = self.num_layers * 2 * self.num_kv_heads * self.tokens_per_block
        return slots * slot_stride + positions % self.tokens_per_block
