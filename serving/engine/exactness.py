"""Measures, at start-up, to which multiple rows must be padded for a row's bits not to depend on the batch (E1).

The libraries below promise nothing; which kernel they take depends on the CPU, the shape, the number of rows
and threads. So the real products are computed at several sizes and places, with 1 thread and with the number
in force, and compared bit for bit. Costs half a second for 135 million parameters.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch

from serving.engine.linear import MAX_ROWS, Linear
from serving.engine.paging import TILE_TOKENS

_MULTIPLES = (1, 2, 4, 8, 16, 32, 64)
_CHECKED_ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 15, 16, 17, 24, 31, 32, 33, 48, 64, 65, 128, 320, 511)
_MOVED_ROWS = 17
"""Up to this size, a batch at another place of the same rows is compared too."""
_CHECKED_PRODUCTS = (1, 2, 5, 24)
"""Numbers of products in one batched call of attention."""


class InexactKernelError(RuntimeError):
    """No padding makes this machine's kernels batch-invariant; `engine.exact: false` runs without."""


def linear_row_multiple(
    linears: Iterable[Linear], dtype: torch.dtype, device: torch.device, max_rows: int = MAX_ROWS
) -> int:
    """Smallest multiple of rows at which each row of a linear layer equals its twin in a full batch.

    Args:
        linears: the layers in use; one of each shape is measured.
        dtype: format of the rows.
        device: where the weights are.
        max_rows: the largest batch that these layers see in one call.

    Raises:
        InexactKernelError: not even a multiple of 64 helps.
    """
    by_shape = {(linear.in_features, linear.out_features): linear for linear in linears}
    bad_rows: set[int] = set()
    for linear in by_shape.values():
        generator = torch.Generator().manual_seed(linear.out_features)
        rows = torch.randn(max_rows, linear.in_features, generator=generator).to(device, dtype)
        bad_rows |= _sizes_that_differ(lambda part, linear=linear: linear(part), rows)  # type: ignore[misc]
    return _smallest_multiple(bad_rows, "linear layers")


def attention_row_multiple(head_dim: int, max_rows: int, device: torch.device) -> int:
    """Smallest multiple of query rows at which attention's two products give a row the same bits in any batch.

    Args:
        head_dim: of the model.
        max_rows: query rows of the longest item.
        device: where the pools are.

    Raises:
        InexactKernelError: not even a multiple of 64 helps.
    """
    generator = torch.Generator().manual_seed(head_dim)
    bad_rows: set[int] = set()
    most_rows = max(max_rows, _MULTIPLES[-1])
    for inner, outer in ((head_dim, TILE_TOKENS), (TILE_TOKENS, head_dim)):
        rows = torch.randn(most_rows, inner, generator=generator).to(device)
        matrices = torch.randn(_CHECKED_PRODUCTS[-1], inner, outer, generator=generator).to(device)
        if outer == TILE_TOKENS:
            # Keys arrive as [tokens, head_dim] and are multiplied transposed: another kernel.
            matrices = matrices.transpose(1, 2).contiguous().transpose(1, 2)
        for num_products in _CHECKED_PRODUCTS:
            # The last matrix is compared, so that its place in the batch moves too.
            some = matrices[-num_products:]
            expected = torch.matmul(rows, matrices)[-1]
            bad_rows |= _sizes_that_differ(
                lambda part, some=some: torch.bmm(part.expand(len(some), -1, -1).contiguous(), some)[-1],  # type: ignore[misc]
                rows,
                expected,
            )
    return _smallest_multiple(bad_rows, "attention's products")


def _sizes_that_differ(
    product: Callable[[torch.Tensor], torch.Tensor], rows: torch.Tensor, expected: torch.Tensor | None = None
) -> set[int]:
    """Numbers of rows at which the first or the last of `rows` differ from the product of them all on 1 thread."""
    bad: set[int] = set()
    threads_in_force = torch.get_num_threads()
    for num_threads in sorted({1, threads_in_force}):
        with _threads(num_threads):
            if expected is None:
                expected = product(rows)
            for num_rows in _CHECKED_ROWS:
                if num_rows > len(rows):
                    break
                is_equal = torch.equal(product(rows[:num_rows]), expected[:num_rows])
                if is_equal and num_rows <= _MOVED_ROWS:
                    is_equal = torch.equal(product(rows[-num_rows:]), expected[-num_rows:])
                if not is_equal:
                    bad.add(num_rows)
    return bad


def _smallest_multiple(bad_rows: set[int], what: str) -> int:
    for multiple in _MULTIPLES:
        if not any(num_rows % multiple == 0 for num_rows in bad_rows):
            return multiple
    msg = f"{what} give other bits in batches of {sorted(bad_rows)} rows than in a full one; set engine.exact: false"
    raise InexactKernelError(msg)


@contextmanager
def _threads(num_threads: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
