"""Turns a `StepBatch` into index tensors, once per step; every layer then runs without Python per request.

Checks that every position of the batch has a page. Computes no layer and touches no pool.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from manager import LayerGroupId
from serving.engine.attention import AttentionGroup, ProductRule
from serving.engine.batch import SequenceRows, StepBatch
from serving.engine.linear import RowRule
from serving.engine.paging import TILE_TOKENS, PageLayout

ITEM_TOKENS = 64
"""Queries of one item; a chunk is cut into these from its start."""
_MAX_KEY_BYTES = 6 << 20
"""Bound on the copied keys of one group, and on its values. Above, the allocator gives the memory back to the
system after each layer, and page faults double the time of a step."""
_MAX_SCORE_BYTES = 24 << 20
"""Bound on the scores of one group."""


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """What one layer group needs in this step.

    Attributes:
        token_rows: [num_tokens, 2, num_kv_heads] where the new keys and values go, in layer 0.
        attention: groups of items that together are all queries of the step.
    """

    token_rows: torch.Tensor
    attention: tuple[AttentionGroup, ...]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """A step as tensors.

    Attributes:
        token_ids: [num_rows] int64, padded with token 0 to a multiple of the rule's.
        positions: [num_rows] int64, padded with 0.
        num_tokens: rows that are no padding; they come first.
        groups: per layer group.
        drawn_rows: [num_drawn_rows] the last row of each sequence that draws, padded with row 0.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    num_tokens: int
    groups: Mapping[LayerGroupId, GroupPlan]
    drawn_rows: torch.Tensor


@dataclass(frozen=True, slots=True)
class BatchRules:
    """How rows are batched so that they are computed as in any other batch (E1).

    Attributes:
        linear: for the layers' linear layers.
        head: for the output head.
        attention: for attention's products.
    """

    linear: RowRule
    head: RowRule
    attention: ProductRule


@dataclass(frozen=True, slots=True)
class _Item:
    """Queries [first, first + num_tokens) of one sequence, whose row 0 is `row`."""

    sequence: SequenceRows
    row: int
    first: int
    num_tokens: int

    @property
    def num_tiles(self) -> int:
        return -(-(self.first + self.num_tokens) // TILE_TOKENS)


class StepPlanner:
    """Makes the plan of each step for one set of pools."""

    def __init__(
        self,
        layouts: Mapping[LayerGroupId, PageLayout],
        heads_per_kv: int,
        rules: BatchRules,
        device: torch.device,
    ) -> None:
        """Keep the layouts; `heads_per_kv` is the number of query heads per KV head."""
        self._layouts = dict(layouts)
        self._heads_per_kv = heads_per_kv
        self._rules = rules
        self._device = device

    def plan(self, batch: StepBatch) -> StepPlan:
        """Index tensors of `batch`.

        Raises:
            ValueError: no rows, a sequence without rows, or a position that has no page.
        """
        sequences = batch.sequences
        for sequence in sequences:
            self._check(sequence)
        lengths = [len(sequence.token_ids) for sequence in sequences]
        first_rows = np.concatenate([[0], np.cumsum(lengths)])
        num_tokens = int(first_rows[-1])
        if not num_tokens:
            msg = "a step needs at least one row"
            raise ValueError(msg)
        positions = np.concatenate([np.arange(s.start, s.start + len(s.token_ids)) for s in sequences])
        token_ids = np.concatenate([s.token_ids for s in sequences])
        items = list(_cut_items(sequences, first_rows))
        drawn = [int(row) - 1 for row, s in zip(first_rows[1:], sequences, strict=True) if s.sampling is not None]
        return StepPlan(
            token_ids=self._tensor(_pad(token_ids, self._rules.linear.multiple)),
            positions=self._tensor(_pad(positions, self._rules.linear.multiple)),
            num_tokens=num_tokens,
            groups={
                group: GroupPlan(
                    self._token_rows(sequences, group), tuple(self._attention_groups(items, group, positions))
                )
                for group in self._layouts
            },
            drawn_rows=self._tensor(_pad(np.array(drawn, dtype=np.int64), self._rules.head.multiple)),
        )

    def _check(self, sequence: SequenceRows) -> None:
        end = sequence.start + len(sequence.token_ids)
        if end == sequence.start:
            msg = f"{sequence.request_id}: no rows"
            raise ValueError(msg)
        for group, layout in self._layouts.items():
            num_blocks = -(-end // layout.tokens_per_block)
            table = sequence.block_tables[group]
            if len(table) < num_blocks:
                msg = (
                    f"{sequence.request_id}: positions up to {end} need {num_blocks} blocks, the table has {len(table)}"
                )
                raise ValueError(msg)
            needed = table[:num_blocks]
            if needed.min() < 0 or needed.max() >= layout.num_slots:
                msg = f"{sequence.request_id}: a slot of layer group {group} is outside [0, {layout.num_slots})"
                raise ValueError(msg)

    def _token_rows(self, sequences: Sequence[SequenceRows], group: LayerGroupId) -> torch.Tensor:
        layout = self._layouts[group]
        rows = [
            layout.token_rows(s.block_tables[group], np.arange(s.start, s.start + len(s.token_ids))) for s in sequences
        ]
        kv_stride = layout.num_kv_heads * layout.tokens_per_block
        kv_head = np.arange(2)[:, None] * kv_stride + np.arange(layout.num_kv_heads) * layout.tokens_per_block
        return self._tensor(np.concatenate(rows)[:, None, None] + kv_head)

    def _attention_groups(
        self, items: Sequence[_Item], group: LayerGroupId, positions: npt.NDArray[np.int64]
    ) -> Iterator[AttentionGroup]:
        layout = self._layouts[group]
        # Which items share a group changes no bit: products of a batch are computed apart.
        by_length: dict[int, list[_Item]] = defaultdict(list)
        for item in items:
            by_length[item.num_tokens].append(item)
        for length, of_length in by_length.items():
            of_length.sort(key=lambda item: -item.num_tiles)
            tile_bytes = layout.num_kv_heads * TILE_TOKENS * 4
            max_pairs = min(
                _MAX_KEY_BYTES // (tile_bytes * layout.head_dim),
                _MAX_SCORE_BYTES // (tile_bytes * length * self._heads_per_kv),
            )
            for part in _split_by_pairs(of_length, max_pairs):
                yield self._attention_group(part, group, layout, positions)

    def _attention_group(
        self, items: Sequence[_Item], group: LayerGroupId, layout: PageLayout, positions: npt.NDArray[np.int64]
    ) -> AttentionGroup:
        length = items[0].num_tokens
        unit_rows = [_unit_rows(item, group, layout) for item in items]
        pairs_per_tile = tuple(sum(item.num_tiles > t for item in items) for t in range(items[0].num_tiles))
        item_of_pair = np.concatenate([np.arange(count) for count in pairs_per_tile])
        tile_of_pair = np.repeat(np.arange(len(pairs_per_tile)), pairs_per_tile)
        pair_units = np.stack([unit_rows[i][t] for i, t in zip(item_of_pair, tile_of_pair, strict=True)])
        head_offset = np.arange(layout.num_kv_heads) * layout.units_per_block
        query_rows = np.concatenate([np.arange(item.row, item.row + length) for item in items])
        query_positions = positions[query_rows].reshape(len(items), length)[item_of_pair]
        key_positions = tile_of_pair[:, None] * TILE_TOKENS + np.arange(TILE_TOKENS)
        hidden = key_positions[:, None, :] > query_positions[:, :, None]
        partial_units, unwritten = _partial_units(items, layout, item_of_pair, tile_of_pair)
        return AttentionGroup(
            layout=layout,
            query_rows=self._tensor(query_rows),
            num_items=len(items),
            rule=self._rules.attention,
            item_of_pair=self._tensor(item_of_pair),
            pairs_per_tile=pairs_per_tile,
            key_units=self._tensor((pair_units[:, None, :] + head_offset[:, None]).reshape(-1)),
            hidden=self._tensor(hidden[:, None, :, None, :]),
            partial_units=self._tensor(partial_units),
            unwritten=self._tensor(unwritten),
        )

    def _tensor(self, array: npt.NDArray[np.int64] | npt.NDArray[np.bool_]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device)


def _cut_items(sequences: Iterable[SequenceRows], first_rows: npt.NDArray[np.int64]) -> Iterator[_Item]:
    for sequence, row in zip(sequences, first_rows.tolist(), strict=False):
        num_tokens = len(sequence.token_ids)
        for offset in range(0, num_tokens, ITEM_TOKENS):
            length = min(ITEM_TOKENS, num_tokens - offset)
            yield _Item(sequence, row + offset, sequence.start + offset, length)


def _split_by_pairs(items: Sequence[_Item], max_pairs: int) -> Iterator[Sequence[_Item]]:
    """Cut `items` into runs of at most `max_pairs` pairs, but at least one item."""
    first, num_pairs = 0, 0
    for n, item in enumerate(items):
        if n > first and num_pairs + item.num_tiles > max_pairs:
            yield items[first:n]
            first, num_pairs = n, 0
        num_pairs += item.num_tiles
    yield items[first:]


def _unit_rows(item: _Item, group: LayerGroupId, layout: PageLayout) -> npt.NDArray[np.int64]:
    sequence = item.sequence
    return layout.unit_rows(sequence.block_tables[group], _written_tokens(item), item.num_tiles)


def _written_tokens(item: _Item) -> int:
    """Positions of the item's sequence whose keys and values are in the pages while this step attends."""
    return item.sequence.start + len(item.sequence.token_ids)


def _partial_units(
    items: Sequence[_Item],
    layout: PageLayout,
    item_of_pair: npt.NDArray[np.int64],
    tile_of_pair: npt.NDArray[np.int64],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Units that end in unwritten memory, and which of their tokens those are.

    One per sequence and head; but all of a sequence shorter than one unit, whose hidden units are copies of it.
    """
    unit_tokens = layout.unit_tokens
    ends = np.array([_written_tokens(item) for item in items])[item_of_pair]
    ordinals = tile_of_pair[:, None] * layout.units_per_tile + np.arange(layout.units_per_tile)
    holds_end = (ordinals == (ends // unit_tokens)[:, None]) & (ends % unit_tokens != 0)[:, None]
    pairs, units = np.nonzero(holds_end | (ends < unit_tokens)[:, None])
    heads = np.arange(layout.num_kv_heads)
    rows = (pairs[:, None] * layout.num_kv_heads + heads) * layout.units_per_tile + units[:, None]
    unwritten = np.arange(unit_tokens) >= (ends[pairs] % unit_tokens)[:, None]
    return rows.reshape(-1), np.repeat(unwritten, layout.num_kv_heads, axis=0)[:, :, None]


def _pad(values: npt.NDArray[np.int64], multiple: int) -> npt.NDArray[np.int64]:
    return np.pad(values, (0, -len(values) % multiple))
