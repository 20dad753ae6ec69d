"""`TokenArena`: the tokens of every tree node's block, one row per node.

Rows are 16 bits wide until a token needs more, then all of them 32: most of what the tree remembers per block is its
tokens, and many vocabularies fit.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_WIDE = 4
_NARROW = 2


def runs(nodes: Sequence[int]) -> list[tuple[int, int]]:
    """Places [start, end) of consecutive numbers: nodes made together mostly are, and move in one copy."""
    count = len(nodes)
    if nodes[-1] - nodes[0] == count - 1 and list(nodes) == list(range(nodes[0], nodes[0] + count)):
        return [(0, count)]
    starts = [0, *(place for place in range(1, count) if nodes[place] != nodes[place - 1] + 1)]
    return list(zip(starts, [*starts[1:], count], strict=True))


class TokenArena:
    """Rows of `tokens_per_block` tokens, written and read as int32. No view of a row outlives a call."""

    __slots__ = ("_item", "_rows", "_size", "_width")

    def __init__(self, tokens_per_block: int) -> None:
        """No rows."""
        self._size = tokens_per_block
        self._item = _NARROW
        self._width = tokens_per_block * _NARROW
        self._rows = bytearray()

    def extend(self, num_rows: int) -> None:
        """Add rows."""
        self._rows.extend(bytes(num_rows * self._width))

    def put(self, nodes: Sequence[int], spans: Sequence[tuple[int, int]], packed: bytes | bytearray) -> None:
        """Write `packed`, int32 tokens of as many blocks, into the nodes' rows; `spans` are the nodes' `runs`."""
        narrow = self._narrowed(packed) if self._item == _NARROW else packed
        rows, width = self._rows, self._width
        for start, end in spans:
            at = nodes[start] * width
            rows[at : at + (end - start) * width] = narrow[start * width : end * width]

    def put_row(self, node: int, packed: bytes | bytearray) -> None:
        """Write the int32 tokens of one block."""
        narrow = self._narrowed(packed) if self._item == _NARROW else packed
        self._rows[node * self._width : (node + 1) * self._width] = narrow

    def agree(self, nodes: npt.NDArray[np.int32], packed: bytes | bytearray, first: int) -> npt.NDArray[np.bool_]:
        """Per node, whether its row holds the block of `packed` (int32 tokens), from block `first` on."""
        expected = np.frombuffer(packed, np.int32).reshape(-1, self._size)[first : first + len(nodes)]
        kind = np.uint16 if self._item == _NARROW else np.int32
        stored = np.frombuffer(self._rows, kind).reshape(-1, self._size)[nodes]
        same: npt.NDArray[np.bool_] = (stored == expected).all(axis=1)
        return same

    def packed(self, node: int) -> bytes:
        """A row as int32 tokens."""
        row = self._rows[node * self._width : (node + 1) * self._width]
        if self._item == _WIDE:
            return bytes(row)
        wide = bytearray(self._size * _WIDE)
        wide[::_WIDE], wide[1::_WIDE] = row[::_NARROW], row[1::_NARROW]
        return bytes(wide)

    def beginning_alike(self, nodes: Sequence[int], packed: bytes) -> list[int]:
        """Nodes whose rows begin with the first of some int32 tokens."""
        if any(packed[self._item : _WIDE]):
            return []  # no row can hold that token
        head, rows, width = packed[: self._item], self._rows, self._width
        return [node for node in nodes if rows.startswith(head, node * width)]

    def _narrowed(self, packed: bytes | bytearray) -> bytes | bytearray:
        """The tokens in 16 bits; where one does not fit, all rows become wide and `packed` stays as it is."""
        num_tokens = len(packed) // _WIDE
        nothing = bytes(num_tokens)
        if packed[2::_WIDE] != nothing or packed[3::_WIDE] != nothing:  # negative ones, too
            self._widen()
            return packed
        narrow = bytearray(num_tokens * _NARROW)  # byte by byte: faster than numpy for up to a hundred blocks
        narrow[::_NARROW], narrow[1::_NARROW] = packed[::_WIDE], packed[1::_WIDE]
        return narrow

    def _widen(self) -> None:
        self._rows = bytearray(np.frombuffer(self._rows, np.uint16).astype(np.int32).tobytes())
        self._item, self._width = _WIDE, self._size * _WIDE
