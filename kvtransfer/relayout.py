"""Pages of one shape into pages of another: unlike block sizes and tensor-parallel degrees. Pure.

A page is `[num_layers, 2, num_heads, tokens_per_block, head_dim]`. A rank of a tensor-parallel group holds a
contiguous share of the heads, so what two pages have in common is a rectangle of (heads, tokens) in each layer's K and
V: one run of bytes per (layer, K or V, head), and one for all heads where both pages hold the same tokens whole.

    source block of 4      |-0-1-2-3-|-4-5-6-7-|
    destination block of 8 |-0-1-2-3-4-5-6-7-8-|      two source pages, each half of every head's row
"""

from dataclasses import dataclass
from functools import cache

from kvtransfer.errors import HandshakeRefused
from kvtransfer.messages import GroupLayout, PoolLayout

_ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1, "uint8": 1}
Piece = tuple[int, int, int]
"""Offset in the source page, offset in the destination page, number of bytes."""


@dataclass(frozen=True, slots=True)
class PageShape:
    """One layer group's page on one rank.

    Attributes:
        first_head: of the model's heads, the first that this rank holds.
        row_bytes: of one head's K or V at one position.
    """

    num_layers: int
    first_head: int
    num_heads: int
    tokens_per_block: int
    row_bytes: int

    @property
    def head_bytes(self) -> int:
        """From one head to the next."""
        return self.tokens_per_block * self.row_bytes

    @property
    def page_bytes(self) -> int:
        """Of the whole page."""
        return self.num_layers * 2 * self.num_heads * self.head_bytes


def page_shape(layout: PoolLayout, group: GroupLayout) -> PageShape:
    """The shape of a group's pages.

    Raises:
        HandshakeRefused: the ranks do not share the heads evenly, the element size is unknown, or pages hold something
            else than these keys and values: such pages can only move whole.
    """
    heads = group.num_kv_heads or layout.num_kv_heads
    head_dim = group.head_dim or layout.head_dim
    if heads % layout.tp_degree or not 0 <= layout.tp_rank < layout.tp_degree:
        msg = f"tp_degree: {heads} heads are not shared by {layout.tp_degree} ranks, of which this is {layout.tp_rank}"
        raise HandshakeRefused(msg)
    if layout.dtype not in _ITEM_BYTES:
        msg = f"dtype: pages of {layout.dtype} can only move between pools of one shape"
        raise HandshakeRefused(msg)
    share = heads // layout.tp_degree
    row_bytes = head_dim * _ITEM_BYTES[layout.dtype]
    shape = PageShape(len(group.layer_ids), layout.tp_rank * share, share, layout.tokens_per_block, row_bytes)
    if shape.page_bytes != group.page_bytes:
        msg = f"page_bytes: a page of {group.page_bytes} bytes is not the {shape.page_bytes} of {shape}"
        raise HandshakeRefused(msg)
    return shape


@cache
def pieces(
    source: PageShape, destination: PageShape, source_token: int, destination_token: int, num_tokens: int
) -> tuple[Piece, ...]:
    """What to copy from one page into another; few distinct calls, so their answers are kept.

    Args:
        source: shape of the page that is read.
        destination: of the page that is filled; the same layers and row size.
        source_token: first position, counted in the source page.
        destination_token: the same position, counted in the destination page.
        num_tokens: positions; inside both pages.

    Returns:
        Runs by destination offset; empty where the two ranks share no head.
    """
    first = max(source.first_head, destination.first_head)
    last = min(source.first_head + source.num_heads, destination.first_head + destination.num_heads)
    run_bytes = num_tokens * source.row_bytes
    if source.head_bytes == destination.head_bytes == run_bytes:
        heads, run_bytes = (range(first, last, max(1, last - first)), run_bytes * (last - first))
    else:
        heads = range(first, last)
    found: list[Piece] = []
    for plane in range(source.num_layers * 2):
        for head in heads:
            source_row = plane * source.num_heads + head - source.first_head
            destination_row = plane * destination.num_heads + head - destination.first_head
            found.append(
                (
                    source_row * source.head_bytes + source_token * source.row_bytes,
                    destination_row * destination.head_bytes + destination_token * destination.row_bytes,
                    run_bytes,
                )
            )
    return tuple(found)
