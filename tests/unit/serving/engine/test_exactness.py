from collections.abc import Callable

import pytest
import torch

from serving.engine.exactness import InexactKernelError, attention_row_multiple, linear_row_multiple
from serving.engine.linear import MAX_ROWS, PlainLinear, make_linear

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


@pytest.mark.parametrize(
    ("other_kernel_rows", "multiple"), [(set(), 1), ({1, 3}, 2), ({1, 2, 3, 5, 6, 7}, 4), ({1, 9, 12}, 8), ({24}, 16)]
)
def test_the_smallest_multiple_without_a_differing_batch_is_found(other_kernel_rows: set[int], multiple: int) -> None:
    linear = _ClassyLinear(torch.randn(48, 32), other_kernel_rows)

    assert linear_row_multiple([linear], torch.float32, _CPU) == multiple


def test_one_bad_shape_among_good_ones_decides() -> None:
    good, bad = _ClassyLinear(torch.randn(48, 32), set()), _ClassyLinear(torch.randn(32, 48), {2})

    assert linear_row_multiple([good, bad], torch.float32, _CPU) == 4


def test_kernels_that_no_padding_makes_equal_are_refused_by_name() -> None:
    linear = _ClassyLinear(torch.randn(48, 32), {64, 128})

    with pytest.raises(InexactKernelError, match=r"linear layers .*\[64, 128\].*exact: false"):
        linear_row_multiple([linear], torch.float32, _CPU)


def test_the_thread_count_is_as_before_after_measuring(set_threads: Callable[[int], None]) -> None:
    set_threads(2)

    linear_row_multiple([make_linear(torch.randn(48, 32))], torch.float32, _CPU)
    attention_row_multiple(16, 64, _CPU)

    assert torch.get_num_threads() == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(960, 576), (131, 77), (576, 1536)])
def test_every_size_at_the_measured_multiple_gives_the_bits_of_a_full_batch(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    """The start-up measurement samples sizes; here is every one of them for a few shapes."""
    linear = make_linear((torch.randn(shape) * 0.05).to(dtype))
    multiple = linear_row_multiple([linear], dtype, _CPU)
    rows = torch.randn(MAX_ROWS, shape[1]).to(dtype)
    expected = linear(rows)

    for num_rows in range(multiple, MAX_ROWS, max(multiple, 3)):
        size = num_rows - num_rows % multiple
        assert torch.equal(linear(rows[:size]), expected[:size]), size
