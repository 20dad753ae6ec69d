"""Measures, at start-up, how rows must be batched for a row's bits not to depend on the others (E1).

The libraries below promise nothing; which kernel they take depends on the device, the shape, the number of
rows and threads. So the real products are computed at several sizes and places, with 1 thread and with the
number in force, and compared bit for bit. Costs about half a second for 135 million parameters on one core.

Where no padding to a multiple makes sizes agree (cuBLAS chooses among many kernels by size), every call gets
one fixed size: the same kernel every time, so that only the place within the call could still matter, and
that is measured too.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch

from serving.engine.attention import ProductRule, multiply
from serving.engine.linear import Linear, RowRule
from serving.engine.paging import TILE_TOKENS

_MULTIPLES = (1, 2, 4, 8, 16, 32, 64)
_CHECKED_ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 15, 16, 17, 24, 31, 32, 33, 48, 64, 65, 128, 320, 511)
_MOVED_ROWS = 17
"""Up to this size, a batch at another place of the same rows is compared too."""
_FIXED_ROWS = 128
_FIXED_PRODUCTS = 64
_CHECKED_PRODUCTS = (1, 2, 5, 100)
_MANY_PRODUCTS_ROWS = 64
"""With the most products, sizes up to here are compared: larger ones are those of long chunks, with few."""


class InexactKernelError(RuntimeError):
    """Nothing makes this machine's kernels batch-invariant; `engine.exact: false` runs without."""


def measure_linears(linears: Iterable[Linear], dtype: torch.dtype, device: torch.device, max_rows: int) -> RowRule:
    """The least padding with which each row of a linear layer equals its twin in a full batch.

    Args:
        linears: the layers in use; one of each shape is measured.
        dtype: format of the rows.
        device: where the weights are.
        max_rows: the largest batch that these layers should see in one call.

    Raises:
        InexactKernelError: even in calls of one size, a row's bits depend on its place.
    """
    by_shape = {(linear.in_features, linear.out_features): linear for linear in linears}
    measured = []
    for linear in by_shape.values():
        generator = torch.Generator().manual_seed(linear.out_features)
        measured.append((linear, torch.randn(max_rows, linear.in_features, generator=generator).to(device, dtype)))
    bad_sizes: set[int] = set()
    for linear, rows in measured:
        bad_sizes |= _sizes_that_differ(linear, rows, linear)
    multiple = _smallest_multiple(bad_sizes)
    if multiple is not None:
        return RowRule(multiple, max_rows)
    fixed = min(max_rows, _FIXED_ROWS)
    for linear, rows in measured:
        _require_equal_places(linear, rows[:fixed], f"a {linear.in_features} x {linear.out_features} layer")
    return RowRule(fixed, fixed)


def measure_attention(head_dim: int, max_rows: int, device: torch.device) -> ProductRule:
    """The least padding with which a query row of attention's two products has the same bits in any batch.

    Args:
        head_dim: of the model.
        max_rows: query rows of the longest item.
        device: where the pools are.

    Raises:
        InexactKernelError: even in calls of one size, a row's bits depend on its place.
    """
    most_rows = -(-max_rows // _MULTIPLES[-1]) * _MULTIPLES[-1]
    generator = torch.Generator().manual_seed(head_dim)
    measured = []
    for inner, outer in ((head_dim, TILE_TOKENS), (TILE_TOKENS, head_dim)):
        rows = torch.randn(most_rows, inner, generator=generator).to(device)
        matrices = torch.randn(_CHECKED_PRODUCTS[-1], inner, outer, generator=generator).to(device)
        if outer == TILE_TOKENS:
            # Keys arrive as [tokens, head_dim] and are multiplied transposed: another kernel.
            matrices = matrices.transpose(1, 2).contiguous().transpose(1, 2)
        measured.append((rows, matrices))
    any_size = ProductRule(row_multiple=1, products_per_call=None)
    bad_sizes: set[int] = set()
    for rows, matrices in measured:
        reference = _product_of_last(matrices[-2:], any_size)
        for count in _CHECKED_PRODUCTS:
            some_rows = rows[:_MANY_PRODUCTS_ROWS] if count == _CHECKED_PRODUCTS[-1] else rows
            bad_sizes |= _sizes_that_differ(_product_of_last(matrices[-count:], any_size), some_rows, reference)
    multiple = _smallest_multiple(bad_sizes)
    if multiple is not None:
        return ProductRule(row_multiple=multiple, products_per_call=None)
    fixed = ProductRule(row_multiple=most_rows, products_per_call=_FIXED_PRODUCTS)
    for rows, matrices in measured:
        # The last matrix comes at another place of the call each time.
        for count in _CHECKED_PRODUCTS:
            _require_equal_places(_product_of_last(matrices[-count:], fixed), rows, "attention")
    return fixed


def _product_of_last(matrices: torch.Tensor, rule: ProductRule) -> Callable[[torch.Tensor], torch.Tensor]:
    """Multiplies the same rows with every matrix, in one batch, and keeps the last result."""
    return lambda rows: multiply(rows.expand(len(matrices), -1, -1).contiguous(), matrices, rule)[-1]


def _sizes_that_differ(
    product: Callable[[torch.Tensor], torch.Tensor],
    rows: torch.Tensor,
    reference: Callable[[torch.Tensor], torch.Tensor],
) -> set[int]:
    """Numbers of rows at which `product` of the first or the last of `rows` differs from `reference` of them all."""
    bad: set[int] = set()
    with _threads(1):
        expected = reference(rows)
    for num_threads in sorted({1, torch.get_num_threads()}):
        with _threads(num_threads):
            for size in _CHECKED_ROWS:
                if size > len(rows):
                    break
                is_equal = torch.equal(product(rows[:size]), expected[:size])
                if is_equal and size <= _MOVED_ROWS:
                    is_equal = torch.equal(product(rows[-size:]), expected[-size:])
                if not is_equal:
                    bad.add(size)
    return bad


def _smallest_multiple(bad_sizes: set[int]) -> int | None:
    return next((m for m in _MULTIPLES if not any(size % m == 0 for size in bad_sizes)), None)


def _require_equal_places(product: Callable[[torch.Tensor], torch.Tensor], rows: torch.Tensor, what: str) -> None:
    """Check that rows keep their bits when they change places in a call of their number."""
    with _threads(1):
        expected = product(rows)
    for num_threads in sorted({1, torch.get_num_threads()}):
        with _threads(num_threads):
            for shift in (0, 1, len(rows) // 2, len(rows) - 3):
                if not torch.equal(product(rows.roll(shift, 0)), expected.roll(shift, 0)):
                    msg = f"{what}: rows have other bits at other places of one batch; set engine.exact: false"
                    raise InexactKernelError(msg)


@contextmanager
def _threads(num_threads: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
