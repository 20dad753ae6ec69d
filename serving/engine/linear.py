"""Linear layers whose rows do not depend on the other rows (E1).

One kernel per device and number format, behind `make_linear`. What was measured for float32 on an
AVX2 CPU (torch 2.13, oneDNN 3.12, MKL 2024.2; rows 1 to 512; 1 and 2 threads; eleven shapes):

- `F.linear` (MKL) takes other kernels for 1 to 3 rows, and with 2 threads for 5 to 7 and 9: rows
  are equal only from multiples of 8 on. `mm(W, x.T)` differs up to 9 rows, 8 included.
- oneDNN with a prepacked weight gives equal rows for every number of rows, and is the fastest of
  all (1.2 to 2 times): weights are packed once at load.
- CPUs without bfloat16 instructions multiply bfloat16 up to 20 times slower than float32. There a
  bfloat16 layer keeps its weight as float32 (every bfloat16 is one), and rounds its result.

None of this is promised by the libraries, so `exactness.py` measures it again at start-up, on this
machine, for the shapes of this model.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn import functional

MAX_ROWS = 512
"""Rows of one kernel call. A larger step is cut, so that the start-up measurement covers every size in use."""


@dataclass(frozen=True, slots=True)
class RowRule:
    """How rows are batched: padded to a multiple of `multiple`, at most `max_rows` (one itself) in a call."""

    multiple: int
    max_rows: int


class Linear(Protocol):
    """`rows @ weight.T`, in the model's number format."""

    in_features: int
    out_features: int

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Map [num_rows, in_features] to [num_rows, out_features], same dtype and device."""
        ...


class PlainLinear:
    """torch's own `linear`: every device."""

    def __init__(self, weight: torch.Tensor) -> None:
        """Keep `weight` [out_features, in_features] as it is."""
        self.out_features, self.in_features = weight.shape
        self._weight = weight

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Map [num_rows, in_features] to [num_rows, out_features]."""
        return functional.linear(rows, self._weight)


class PackedLinear:
    """oneDNN over a weight laid out once for its kernels: CPU only."""

    def __init__(self, weight: torch.Tensor) -> None:
        """Pack a copy of `weight` [out_features, in_features], float32 or bfloat16."""
        self.out_features, self.in_features = weight.shape
        self._dtype = weight.dtype
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), MAX_ROWS)  # noqa: SLF001 (no public name)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Map [num_rows, in_features] to [num_rows, out_features]; rounds to the format of `rows`."""
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(  # noqa: SLF001 (no public name)
            rows.to(self._dtype), self._packed, None, "none", [], ""
        )
        return out.to(rows.dtype)


def make_linear(weight: torch.Tensor) -> Linear:
    """The fastest exact kernel for `weight` [out_features, in_features] on its device."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return PlainLinear(weight)
    if weight.dtype is torch.bfloat16 and not cpu_has_bfloat16():
        return PackedLinear(weight.float())
    return PackedLinear(weight)


def cpu_has_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 in hardware (avx512_bf16 or AMX) and oneDNN uses it."""
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())  # noqa: SLF001 (no public name)


def apply_linear(linear: Linear, rows: torch.Tensor, rule: RowRule) -> torch.Tensor:
    """`linear(rows)` in calls as `rule` says.

    Args:
        linear: the layer.
        rows: [num_rows, in_features], already padded to the rule's multiple.
        rule: measured for this layer.
    """
    if len(rows) <= rule.max_rows:
        return linear(rows)
    step = rule.max_rows
    return torch.cat([linear(rows[first : first + step]) for first in range(0, len(rows), step)])
