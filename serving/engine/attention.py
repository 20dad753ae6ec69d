"""Causal attention over pages, in an order of summation that depends on nothing but positions (E1).

Keys are cut at multiples of 128 positions into tiles. For a query, the maximum is taken over all its
tiles (exact in any order), the weights of each tile are summed and multiplied with its values alone,
and the tiles' results are added first to last. So a decode step, a whole prompt and a chunk of
any size add the same numbers in the same order. A tile that a query may not see has weights of exactly 0
and adds exactly 0; so one that no query of an item sees is left out, and with it what a window has passed.

Scores and weights are float32 whatever the format of the pages. Matrix products are batched as a `ProductRule`
says: MKL (2024.2) takes other kernels for 1 to 3 rows, and for 5 to 7 with 2 threads, but was measured to give equal
rows at every multiple of 4 and for any number of products in a call.

Legend of shapes:
    I  items: runs of consecutive queries of one sequence, of equal length n
    P  pairs of an item and a tile that it sees, tile-major: all items' first tile, then their second, ...
    H  KV heads;  G  query heads per KV head;  D  head_dim
    R  query rows of an item for one KV head: n * G, padded
    K  TILE_TOKENS keys;  U  units of a tile
Suffixes of variables are these letters in lower case: `scores_phrk` is [P, H, R, K].
"""

from dataclasses import dataclass

import torch
from torch.nn import functional

from serving.engine.paging import TILE_TOKENS, PageLayout


@dataclass(frozen=True, slots=True)
class ProductRule:
    """How attention's matrix products are batched, as `exactness.py` measured.

    Attributes:
        row_multiple: query rows of an item are padded to a multiple of this.
        products_per_call: every call has exactly so many products; None where any number will do.
    """

    row_multiple: int
    products_per_call: int | None


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """Items that are computed together; built once per step, used by every layer.

    Items are sorted by falling number of tiles, so that those with a t-th tile are the first ones.

    Attributes:
        layout: of the pool that the pages are in.
        query_rows: [I * n] rows of the step's queries, item by item.
        num_items: I.
        rule: R is n * G rounded up to its multiple.
        item_of_pair: [P].
        pairs_per_tile: for each t, the number of items that see at least t + 1 tiles; falls, and adds up to P.
        key_units: [P * H * U] unit rows of the keys in layer 0; one that nobody sees is replaced by one seen.
        hidden: [P, 1, n, 1, K] true where a key lies after the query, or outside its window and the sinks.
        partial_units: [X] of the P * H * U units, those which hold the last position of a sequence
            and unwritten memory after it.
        unwritten: [X, unit_tokens, 1] true at the unwritten positions of `partial_units`.
    """

    layout: PageLayout
    query_rows: torch.Tensor
    num_items: int
    rule: ProductRule
    item_of_pair: torch.Tensor
    pairs_per_tile: tuple[int, ...]
    key_units: torch.Tensor
    hidden: torch.Tensor
    partial_units: torch.Tensor
    unwritten: torch.Tensor

    @property
    def item_tokens(self) -> int:
        """The length n of every item."""
        return len(self.query_rows) // self.num_items


def write_pages(pool: torch.Tensor, token_rows: torch.Tensor, layer: int, keys_values: torch.Tensor) -> None:
    """Put the new keys and values of one layer into their pages.

    Args:
        pool: the layer group's pool; changed.
        token_rows: [num_tokens, 2, H] token rows in layer 0.
        layer: index of the layer in its group.
        keys_values: [num_tokens, 2, H, D] float32; rounded to the pool's format.
    """
    layout = PageLayout.of(pool)
    layer_rows = 2 * layout.num_kv_heads * layout.tokens_per_block
    rows = (token_rows + layer * layer_rows).view(-1)
    pool.view(-1, layout.head_dim).index_copy_(0, rows, keys_values.view(-1, layout.head_dim).to(pool.dtype))


def attend(queries: torch.Tensor, pool: torch.Tensor, layer: int, group: AttentionGroup) -> torch.Tensor:
    """Attention of the group's items; reads pages, changes nothing.

    Args:
        queries: [num_rows, H, G, D] float32, of the whole step, already divided by sqrt(D).
        pool: the layer group's pool, this step's keys and values written.
        layer: index of the layer in its group.
        group: which of the queries, and where their keys are.

    Returns:
        [I * n, H * G * D] float32, in the order of `group.query_rows`.
    """
    num_items, num_tokens = group.num_items, group.item_tokens
    _, num_heads, heads_per_kv, head_dim = queries.shape
    rows_inhgd = queries[group.query_rows].view(num_items, num_tokens, num_heads, heads_per_kv, head_dim)
    item_rows = num_tokens * heads_per_kv
    q_ihrd = rows_inhgd.transpose(1, 2).reshape(num_items, num_heads, item_rows, head_dim)
    padding = -item_rows % group.rule.row_multiple
    if padding:
        q_ihrd = functional.pad(q_ihrd, (0, 0, 0, padding))
    keys_phkd, values_phkd = read_tiles(pool, layer, group)
    out_ihrd = _attend_tiles(q_ihrd, keys_phkd, values_phkd, group, heads_per_kv)
    out = out_ihrd[:, :, :item_rows].view(num_items, num_heads, num_tokens, heads_per_kv, head_dim)
    return out.transpose(1, 2).reshape(num_items * num_tokens, num_heads * heads_per_kv * head_dim)


def read_tiles(pool: torch.Tensor, layer: int, group: AttentionGroup) -> tuple[torch.Tensor, torch.Tensor]:
    """Copy the group's keys and values out of their pages: two [P, H, K, D] float32.

    Values at unwritten positions become 0: their weight is 0, but 0 * NaN is not. (Keys need no such
    care: their scores are overwritten.)
    """
    layout = group.layout
    key_units = group.key_units + layer * 2 * layout.unit_rows_per_kv
    units = pool.view(-1, layout.unit_tokens * layout.head_dim)
    shape = (len(group.item_of_pair), layout.num_kv_heads, TILE_TOKENS, layout.head_dim)
    keys = units.index_select(0, key_units).float().view(shape)
    values = units.index_select(0, key_units + layout.unit_rows_per_kv).float()
    if len(group.partial_units):
        by_token = values.view(-1, layout.unit_tokens, layout.head_dim)
        by_token[group.partial_units] = by_token[group.partial_units].masked_fill_(group.unwritten, 0.0)
    return keys, values.view(shape)


def multiply(rows: torch.Tensor, matrices: torch.Tensor, rule: ProductRule) -> torch.Tensor:
    """Batched product [n, rows, inner] @ [n, inner, outer], in calls as `rule` says."""
    size = rule.products_per_call
    if size is None:
        return torch.bmm(rows, matrices)
    padding = (0, 0, 0, 0, 0, -len(rows) % size)
    all_rows, all_matrices = functional.pad(rows, padding), functional.pad(matrices, padding)
    calls = range(0, len(rows), size)
    out = torch.cat([torch.bmm(all_rows[n : n + size], all_matrices[n : n + size]) for n in calls])
    return out[: len(rows)]


def _attend_tiles(
    q_ihrd: torch.Tensor, keys_phkd: torch.Tensor, values_phkd: torch.Tensor, group: AttentionGroup, heads_per_kv: int
) -> torch.Tensor:
    num_pairs = len(group.item_of_pair)
    num_items, num_heads, num_rows, head_dim = q_ihrd.shape
    q_phrd = q_ihrd[group.item_of_pair]
    scores_phrk = multiply(q_phrd.flatten(0, 1), keys_phkd.flatten(0, 1).transpose(1, 2), group.rule).view(
        num_pairs, num_heads, num_rows, TILE_TOKENS
    )
    item_rows = group.item_tokens * heads_per_kv
    by_query = scores_phrk[:, :, :item_rows].view(num_pairs, num_heads, -1, heads_per_kv, TILE_TOKENS)
    by_query.masked_fill_(group.hidden, float("-inf"))

    tile_max_phr = scores_phrk.amax(-1)
    max_ihr = tile_max_phr[:num_items].clone()
    first = num_items
    for num_seeing in group.pairs_per_tile[1:]:
        seeing = max_ihr[:num_seeing]
        torch.maximum(seeing, tile_max_phr[first : first + num_seeing], out=seeing)
        first += num_seeing

    weights_phrk = scores_phrk.sub_(max_ihr[group.item_of_pair].unsqueeze(-1)).exp_()
    tile_sum_phr = weights_phrk.sum(-1)
    partial_phrd = multiply(weights_phrk.flatten(0, 1), values_phkd.flatten(0, 1), group.rule).view(
        num_pairs, num_heads, num_rows, head_dim
    )
    sum_ihr = tile_sum_phr[:num_items].clone()
    out_ihrd = partial_phrd[:num_items].clone()
    first = num_items
    for num_seeing in group.pairs_per_tile[1:]:
        sum_ihr[:num_seeing] += tile_sum_phr[first : first + num_seeing]
        out_ihrd[:num_seeing] += partial_phrd[first : first + num_seeing]
        first += num_seeing
    return out_ihrd.div_(sum_ihr.unsqueeze(-1))
