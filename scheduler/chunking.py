"""How many tokens of a context run in this step; pure functions.

A chunk that is not the last is a multiple of `unit_tokens`, so that the blocks a context commits do not
depend on what else was in its steps.

    |<------- known tokens of the request ------->|
    | computed | chunk | chunk | chunk | last one |
               ^ start  each a multiple of the unit, the last one whatever remains
"""

from collections.abc import Sequence


def next_chunk_tokens(remaining_tokens: int, rows_left: int, unit_tokens: int) -> int:
    """Tokens of the next chunk, first come first served; 0 when no allowed chunk fits.

    Args:
        remaining_tokens: known tokens not computed yet, at least 1.
        rows_left: rows that the step may still compute.
        unit_tokens: a chunk that is not the last is a multiple of it.
    """
    if remaining_tokens <= rows_left:
        return remaining_tokens
    return rows_left - rows_left % unit_tokens


def equal_progress_tokens(remaining_tokens: Sequence[int], rows_left: int, unit_tokens: int) -> list[int]:
    """Tokens of each context's chunk when all advance alike: one unit each in turn, while rows last.

    A context whose rest is shorter than its turn takes the rest. The result sums to at most
    `rows_left`; a 0 means that no turn came to it.

    Args:
        remaining_tokens: [num_contexts], known tokens not computed yet, each at least 1; first in line first.
        rows_left: rows that the step may still compute.
        unit_tokens: a chunk that is not the last is a multiple of it.
    """
    chunks = [0] * len(remaining_tokens)
    moved = True
    while moved:
        moved = False
        for i, remaining in enumerate(remaining_tokens):
            turn = min(unit_tokens, remaining - chunks[i])
            if 0 < turn <= rows_left:
                chunks[i] += turn
                rows_left -= turn
                moved = True
    return chunks
