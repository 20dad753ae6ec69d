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
from serving.engine.visibility import Visibility

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
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    num_tokens: int
    groups: Mapping[LayerGroupId, GroupPlan]


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
    def end(self) -> int:
        return self.first + self.num_tokens

    @property
    def num_written(self) -> int:
        """Positions of the sequence whose keys and values are in the pages while this step attends."""
        return self.sequence.start + len(self.sequence.token_ids)


@dataclass(frozen=True, slots=True)
class _SeenItem:
    """An item, and what one layer group lets it see.

    Attributes:
        block_table: of its sequence in the group.
        tiles: those that any of its queries sees, rising.
    """

    item: _Item
    block_table: npt.NDArray[np.int32]
    tiles: npt.NDArray[np.int64]

    @property
    def num_tiles(self) -> int:
        return len(self.tiles)


@dataclass(frozen=True, slots=True)
class PlannedGroup:
    """One layer group: its pool's shape, and what its layers let a query see."""

    layout: PageLayout
    visibility: Visibility


class StepPlanner:
    """Makes the plan of each step for one set of pools."""

    def __init__(
        self,
        layer_groups: Mapping[LayerGroupId, PlannedGroup],
        heads_per_kv: int,
        rules: BatchRules,
        device: torch.device,
    ) -> None:
        """Keep the groups; `heads_per_kv` is the number of query heads per KV head."""
        self._layer_groups = dict(layer_groups)
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
        return StepPlan(
            token_ids=self._tensor(_pad(token_ids, self._rules.linear.multiple)),
            positions=self._tensor(_pad(positions, self._rules.linear.multiple)),
            num_tokens=num_tokens,
            groups={
                group: GroupPlan(
                    self._token_rows(sequences, group), tuple(self._attention_groups(items, group, positions))
                )
                for group in self._layer_groups
            },
        )

    def _check(self, sequence: SequenceRows) -> None:
        end = sequence.start + len(sequence.token_ids)
        if end == sequence.start:
            msg = f"{sequence.request_id}: no rows"
            raise ValueError(msg)
        for group, planned in self._layer_groups.items():
            layout = planned.layout
            table = sequence.block_tables[group]
            num_blocks = -(-end // layout.tokens_per_block)
            if len(table) < num_blocks:
                msg = (
                    f"{sequence.request_id}: positions up to {end} need {num_blocks} blocks, the table has {len(table)}"
                )
                raise ValueError(msg)
            needed = table[planned.visibility.runs(sequence.start, end, layout.tokens_per_block)]
            if needed.min() < 0 or needed.max() >= layout.num_slots:
                msg = f"{sequence.request_id}: a slot of layer group {group} is outside [0, {layout.num_slots})"
                raise ValueError(msg)

    def _token_rows(self, sequences: Sequence[SequenceRows], group: LayerGroupId) -> torch.Tensor:
        layout = self._layer_groups[group].layout
        rows = [
            layout.token_rows(s.block_tables[group], np.arange(s.start, s.start + len(s.token_ids))) for s in sequences
        ]
        kv_stride = layout.num_kv_heads * layout.tokens_per_block
        kv_head = np.arange(2)[:, None] * kv_stride + np.arange(layout.num_kv_heads) * layout.tokens_per_block
        return self._tensor(np.concatenate(rows)[:, None, None] + kv_head)

    def _attention_groups(
        self, items: Sequence[_Item], group: LayerGroupId, positions: npt.NDArray[np.int64]
    ) -> Iterator[AttentionGroup]:
        planned = self._layer_groups[group]
        # Which items share a group changes no bit: products of a batch are computed apart.
        by_length: dict[int, list[_SeenItem]] = defaultdict(list)
        for item in items:
            tiles = planned.visibility.runs(item.first, item.end, TILE_TOKENS)
            by_length[item.num_tokens].append(_SeenItem(item, item.sequence.block_tables[group], tiles))
        for length, of_length in by_length.items():
            of_length.sort(key=lambda seen: -seen.num_tiles)
            tile_bytes = planned.layout.num_kv_heads * TILE_TOKENS * 4
            max_pairs = min(
                _MAX_KEY_BYTES // (tile_bytes * planned.layout.head_dim),
                _MAX_SCORE_BYTES // (tile_bytes * length * self._heads_per_kv),
            )
            for part in _split_by_pairs(of_length, max_pairs):
                yield self._attention_group(part, planned, positions)

    def _attention_group(
        self, items: Sequence[_SeenItem], planned: PlannedGroup, positions: npt.NDArray[np.int64]
    ) -> AttentionGroup:
        layout, length = planned.layout, items[0].item.num_tokens
        pairs_per_tile = tuple(sum(seen.num_tiles > place for seen in items) for place in range(items[0].num_tiles))
        item_of_pair = np.concatenate([np.arange(count) for count in pairs_per_tile])
        place_of_pair = np.repeat(np.arange(len(pairs_per_tile)), pairs_per_tile)
        tile_of_pair = _join([seen.tiles for seen in items]).at(item_of_pair, place_of_pair)
        units = _read_units(items, planned, item_of_pair, tile_of_pair)
        blocks = units // layout.units_per_block
        slots = _join([seen.block_table for seen in items]).at(item_of_pair[:, None], blocks)
        head_offset = np.arange(layout.num_kv_heads) * layout.units_per_block
        query_rows = np.concatenate([np.arange(seen.item.row, seen.item.row + length) for seen in items])
        query_positions = positions[query_rows].reshape(len(items), length)[item_of_pair]
        key_positions = tile_of_pair[:, None] * TILE_TOKENS + np.arange(TILE_TOKENS)
        hidden = planned.visibility.hides(query_positions[:, :, None], key_positions[:, None, :])
        num_written = np.array([seen.item.num_written for seen in items])[item_of_pair]
        partial_units, unwritten = _partial_units(units, num_written, layout)
        return AttentionGroup(
            layout=layout,
            query_rows=self._tensor(query_rows),
            num_items=len(items),
            rule=self._rules.attention,
            item_of_pair=self._tensor(item_of_pair),
            pairs_per_tile=pairs_per_tile,
            key_units=self._tensor((layout.unit_rows(slots, units)[:, None, :] + head_offset[:, None]).reshape(-1)),
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


def _split_by_pairs(items: Sequence[_SeenItem], max_pairs: int) -> Iterator[Sequence[_SeenItem]]:
    """Cut `items` into runs of at most `max_pairs` pairs, but at least one item."""
    first, num_pairs = 0, 0
    for n, seen in enumerate(items):
        if n > first and num_pairs + seen.num_tiles > max_pairs:
            yield items[first:n]
            first, num_pairs = n, 0
        num_pairs += seen.num_tiles
    yield items[first:]


@dataclass(frozen=True, slots=True)
class _Joined:
    """Arrays of different lengths, end to end: one look-up serves many of them.

    Attributes:
        values: of all.
        starts: where each begins.
    """

    values: npt.NDArray[np.int64]
    starts: npt.NDArray[np.int64]

    def at(self, arrays: npt.NDArray[np.int64], places: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The values at these places of these arrays; two arrays that broadcast."""
        found: npt.NDArray[np.int64] = self.values[self.starts[arrays] + places]
        return found


def _join(arrays: Sequence[npt.NDArray[np.int64]] | Sequence[npt.NDArray[np.int32]]) -> _Joined:
    lengths = [len(array) for array in arrays]
    return _Joined(np.concatenate(arrays).astype(np.int64), np.concatenate([[0], np.cumsum(lengths[:-1])]).astype(int))


def _read_units(
    items: Sequence[_SeenItem],
    planned: PlannedGroup,
    item_of_pair: npt.NDArray[np.int64],
    tile_of_pair: npt.NDArray[np.int64],
) -> npt.NDArray[np.int64]:
    """Ordinals of the units that stand for those of each pair's tile: [P, units_per_tile].

    A unit that no query of its item sees gives way to the first one of its window: it may have no page, or
    memory that was never written, and what is read must be finite although its weight is 0.
    """
    layout, sinks = planned.layout, planned.visibility.num_sink_tokens
    starts = [planned.visibility.first_in_window(seen.item.first) for seen in items]
    first_in_window = np.array(starts)[item_of_pair][:, None] // layout.unit_tokens
    num_written = np.array([seen.item.num_written for seen in items])[item_of_pair][:, None]
    units = tile_of_pair[:, None] * layout.units_per_tile + np.arange(layout.units_per_tile)
    is_seen = (units >= first_in_window) | (units * layout.unit_tokens < sinks)
    return np.where(is_seen & (units * layout.unit_tokens < num_written), units, first_in_window)


def _partial_units(
    units: npt.NDArray[np.int64], num_written: npt.NDArray[np.int64], layout: PageLayout
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Which of [P, H, units_per_tile] units end in unwritten memory, and which of their tokens those are."""
    unit_tokens = layout.unit_tokens
    pairs, places = np.nonzero((units + 1) * unit_tokens > num_written[:, None])
    heads = np.arange(layout.num_kv_heads)
    rows = (pairs[:, None] * layout.num_kv_heads + heads) * layout.units_per_tile + places[:, None]
    unwritten = np.arange(unit_tokens) >= (num_written[pairs] % unit_tokens)[:, None]
    return rows.reshape(-1), np.repeat(unwritten, layout.num_kv_heads, axis=0)[:, :, None]


def _pad(values: npt.NDArray[np.int64], multiple: int) -> npt.NDArray[np.int64]:
    return np.pad(values, (0, -len(values) % multiple))
