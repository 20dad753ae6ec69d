from collections.abc import Callable

import pytest
import torch

from serving.engine import exactness
from serving.engine.attention import ProductRule, multiply
from serving.engine.exactness import InexactKernelError, measure_attention, measure_linears
from serving.engine.linear import MAX_ROWS, PlainLinear, RowRule, make_linear

_CPU = torch.device("cpu")


class _ClassyLinear(PlainLinear):
    """Takes another kernel (one more rounding) for some numbers of rows, as MKL does."""

    def __init__(self, weight: torch.Tensor, other_kernel_rows: set[int]) -> None:
        super().__init__(weight)
        self._other_kernel_rows = other_kernel_rows

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        padded = torch.nn.functional.pad(rows, (0, 0, 0, -len(rows) % 64))
        out = super().__call__(padded)[: len(rows)]
        return out.bfloat16().float() if len(rows) in self._other_kernel_rows else out


class _PlaceLinear(PlainLinear):
    """Computes row 1 of every call otherwise, and calls of every size too."""

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        out = super().__call__(rows) + 1e-4 * len(rows)
        out[1:2] = out[1:2].bfloat16().float()
        return out


def _measure(*linears: PlainLinear) -> RowRule:
    return measure_linears(linears, torch.float32, _CPU, MAX_ROWS)


@pytest.mark.parametrize(
    ("other_kernel_rows", "multiple"), [(set(), 1), ({1, 3}, 2), ({1, 2, 3, 5, 6, 7}, 4), ({1, 9, 12}, 8), ({24}, 16)]
)
def test_the_smallest_multiple_without_a_differing_batch_is_found(other_kernel_rows: set[int], multiple: int) -> None:
    assert _measure(_ClassyLinear(torch.randn(48, 32), other_kernel_rows)) == RowRule(multiple, MAX_ROWS)


def test_one_bad_shape_among_good_ones_decides() -> None:
    good, bad = _ClassyLinear(torch.randn(48, 32), set()), _ClassyLinear(torch.randn(32, 48), {2})

    assert _measure(good, bad).multiple == 4


def test_where_no_multiple_helps_every_call_gets_one_size() -> None:
    assert _measure(_ClassyLinear(torch.randn(48, 32), {64, 320})) == RowRule(128, 128)


def test_kernels_that_look_at_the_place_are_refused_by_name() -> None:
    with pytest.raises(InexactKernelError, match=r"a 32 x 48 layer: .*exact: false"):
        _measure(_PlaceLinear(torch.randn(48, 32)))


def test_attention_gets_one_size_of_call_where_no_multiple_helps(monkeypatch: pytest.MonkeyPatch) -> None:

    def multiply_by_size(rows: torch.Tensor, matrices: torch.Tensor, rule: ProductRule) -> torch.Tensor:
        out = multiply(rows, matrices, rule)
        return out if rule.products_per_call else out + 1e-4 * len(rows)

    monkeypatch.setattr(exactness, "multiply", multiply_by_size)

    assert measure_attention(16, 90, _CPU) == ProductRule(row_multiple=128, products_per_call=64)


def test_the_thread_count_is_as_before_after_measuring(set_threads: Callable[[int], None]) -> None:
    set_threads(2)

    measure_linears([make_linear(torch.randn(48, 32))], torch.float32, _CPU, MAX_ROWS)
    measure_attention(16, 64, _CPU)

    assert torch.get_num_threads() == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(960, 576), (131, 77), (576, 1536)])
def test_every_size_at_the_measured_multiple_gives_the_bits_of_a_full_batch(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    """The start-up measurement samples sizes; here are many more of them for a few shapes."""
    linear = make_linear((torch.randn(shape) * 0.05).to(dtype))
    rule = measure_linears([linear], dtype, _CPU, MAX_ROWS)
    rows = torch.randn(rule.max_rows, shape[1]).to(dtype)
    expected = linear(rows)

    for num_rows in range(rule.multiple, rule.max_rows, max(rule.multiple, 3)):
        size = num_rows - num_rows % rule.multiple
        assert torch.equal(linear(rows[:size]), expected[:size]), size
