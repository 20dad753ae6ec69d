"""Paged attention against the plain formula, for every way to lay pages out."""

import numpy as np
import pytest
import torch

from serving.engine.attention import ProductRule, attend, multiply, read_tiles, write_pages
from serving.engine.batch import StepBatch
from serving.engine.linear import RowRule
from serving.engine.paging import PageLayout
from serving.engine.plan import BatchRules, PlannedGroup, StepPlan, StepPlanner
from serving.engine.visibility import Visibility
from tests.fakes.engine_rows import GROUP, HandFedSequence

_KV_HEADS, _HEADS_PER_KV, _HEAD_DIM, _NUM_LAYERS = 2, 3, 16, 2
_NUM_SLOTS = 400
_ALL = Visibility()
_RULES = BatchRules(RowRule(1, 512), RowRule(1, 32), ProductRule(row_multiple=4, products_per_call=None))


def _make_pool(tokens_per_block: int) -> torch.Tensor:
    return torch.full((_NUM_SLOTS, _NUM_LAYERS, 2, _KV_HEADS, tokens_per_block, _HEAD_DIM), float("nan"))


def _plan(pool: torch.Tensor, *sequences: tuple[HandFedSequence, int], visibility: Visibility = _ALL) -> StepPlan:
    """Of sequences, each from a start to its end."""
    planned = {GROUP: PlannedGroup(PageLayout.of(pool), visibility)}
    planner = StepPlanner(planned, _HEADS_PER_KV, _RULES, torch.device("cpu"))
    return planner.plan(StepBatch([s.rows(start, len(s.token_ids)) for s, start in sequences]))


def _attend_all(pool: torch.Tensor, plan: StepPlan, queries: torch.Tensor, layer: int) -> torch.Tensor:
    out = torch.full((len(queries), _KV_HEADS * _HEADS_PER_KV * _HEAD_DIM), float("nan"))
    for group in plan.groups[GROUP].attention:
        out[group.query_rows] = attend(queries, pool, layer, group)
    return out


def _formula(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, start: int, window: int = 1 << 30, sinks: int = 0
) -> torch.Tensor:
    """Causal softmax attention in float64 of queries [n, H, G, D] from position `start` over [N, H, D]."""
    scores = torch.einsum("nhgd,khd->nhgk", queries.double(), keys.double())
    distance = start + torch.arange(len(queries))[:, None] - torch.arange(len(keys))
    hidden = (distance < 0) | ((distance >= window) & (torch.arange(len(keys)) >= sinks))
    weights = scores.masked_fill(hidden[:, None, None, :], float("-inf")).softmax(-1)
    return torch.einsum("nhgk,khd->nhgd", weights, values.double()).flatten(1)


@pytest.mark.parametrize("tokens_per_block", [1, 8, 16, 24, 100, 128, 256])
@pytest.mark.parametrize(("num_tokens", "start"), [(1, 0), (15, 14), (128, 127), (129, 128), (300, 0), (300, 140)])
def test_attention_over_pages_is_the_causal_formula(tokens_per_block: int, num_tokens: int, start: int) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    pool = _make_pool(tokens_per_block)
    num_blocks = -(-num_tokens // tokens_per_block)
    slots = np.random.default_rng(0).permutation(_NUM_SLOTS)[:num_blocks].tolist()
    sequence = HandFedSequence("one", [0] * num_tokens, slots)
    keys_values = torch.randn(num_tokens, 2, _KV_HEADS, _HEAD_DIM, generator=generator)
    write_pages(pool, _plan(pool, (sequence, 0)).groups[GROUP].token_rows, 1, keys_values)
    queries = torch.randn(num_tokens - start, _KV_HEADS, _HEADS_PER_KV, _HEAD_DIM, generator=generator)

    out = _attend_all(pool, _plan(pool, (sequence, start)), queries, layer=1)

    expected = _formula(queries, keys_values[:, 0], keys_values[:, 1], start)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tokens_per_block", [8, 16, 24, 128, 256])
@pytest.mark.parametrize(("window", "sinks"), [(1, 0), (24, 0), (100, 4), (128, 130), (129, 1), (256, 0), (600, 3)])
@pytest.mark.parametrize(("num_tokens", "start"), [(20, 0), (500, 0), (500, 129), (500, 470), (500, 499), (513, 512)])
def test_a_window_and_its_sinks_are_all_that_is_seen_or_read(
    tokens_per_block: int, window: int, sinks: int, num_tokens: int, start: int
) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    pool = _make_pool(tokens_per_block)
    sequence = HandFedSequence("one", [0] * num_tokens, range(-(-num_tokens // tokens_per_block)))
    keys_values = torch.randn(num_tokens, 2, _KV_HEADS, _HEAD_DIM, generator=generator)
    write_pages(pool, _plan(pool, (sequence, 0)).groups[GROUP].token_rows, 1, keys_values)
    queries = torch.randn(num_tokens - start, _KV_HEADS, _HEADS_PER_KV, _HEAD_DIM, generator=generator)
    # What the first query does not see has left, and its memory is as bad as memory can be.
    gone = range(-(-sinks // tokens_per_block), max(0, start - window + 1) // tokens_per_block)
    for block in gone:
        pool[sequence.block_table[block]] = float("nan")
        sequence.block_table[block] = -1

    plan = _plan(pool, (sequence, start), visibility=Visibility(window, sinks))
    out = _attend_all(pool, plan, queries, layer=1)

    expected = _formula(queries, keys_values[:, 0], keys_values[:, 1], start, window, sinks)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


def test_tiles_outside_the_window_cost_nothing() -> None:
    pool = _make_pool(16)
    sequence = HandFedSequence("one", [0] * 3000, range(188))

    (group,) = _plan(pool, (sequence, 2999), visibility=Visibility(200, 4)).groups[GROUP].attention

    assert len(group.item_of_pair) == 1 + 3  # the sinks' tile, and those that 200 positions touch


def test_a_page_inside_the_window_must_be_there() -> None:
    pool = _make_pool(16)
    sequence = HandFedSequence("one", [0] * 100, [-1, 1, 2, 3, 4, 5, 6])

    _plan(pool, (sequence, 99), visibility=Visibility(84))
    with pytest.raises(ValueError, match="a slot of layer group 0 is outside"):
        _plan(pool, (sequence, 99), visibility=Visibility(85))
    with pytest.raises(ValueError, match="a slot of layer group 0 is outside"):
        _plan(pool, (sequence, 99), visibility=Visibility(84, num_sink_tokens=1))


def test_sequences_of_one_step_see_only_their_own_pages() -> None:
    generator = torch.Generator().manual_seed(0)
    pool = _make_pool(16)
    lengths = [5, 300, 1, 170, 16]
    sequences = [HandFedSequence(f"{n}", [0] * length, range(n * 20, n * 20 + 20)) for n, length in enumerate(lengths)]
    contents = [torch.randn(length, 2, _KV_HEADS, _HEAD_DIM, generator=generator) for length in lengths]
    for sequence, keys_values in zip(sequences, contents, strict=True):
        write_pages(pool, _plan(pool, (sequence, 0)).groups[GROUP].token_rows, 0, keys_values)
    starts = [4, 100, 0, 169, 0]
    plan = _plan(pool, *zip(sequences, starts, strict=True))
    queries = torch.randn(plan.num_tokens, _KV_HEADS, _HEADS_PER_KV, _HEAD_DIM, generator=generator)

    out = _attend_all(pool, plan, queries, layer=0)

    first = 0
    for keys_values, start in zip(contents, starts, strict=True):
        rows = slice(first, first + len(keys_values) - start)
        expected = _formula(queries[rows], keys_values[:, 0], keys_values[:, 1], start)
        torch.testing.assert_close(out[rows].double(), expected, rtol=1e-5, atol=1e-5)
        first = rows.stop


def test_a_write_changes_the_named_positions_of_the_named_layer_only() -> None:
    pool = torch.zeros(_NUM_SLOTS, _NUM_LAYERS, 2, _KV_HEADS, 16, _HEAD_DIM)
    sequence = HandFedSequence("one", [0] * 20, [7, 3])
    rows = _plan(pool, (sequence, 15)).groups[GROUP].token_rows

    write_pages(pool, rows, 1, torch.ones(5, 2, _KV_HEADS, _HEAD_DIM))

    expected = torch.zeros_like(pool)
    expected[7, 1, :, :, 15:] = 1
    expected[3, 1, :, :, :4] = 1
    assert torch.equal(pool, expected)


def test_unwritten_memory_never_reaches_the_values() -> None:
    pool = _make_pool(16)
    sequence = HandFedSequence("one", [0] * 20, [7, 3])
    plan = _plan(pool, (sequence, 0))
    write_pages(pool, plan.groups[GROUP].token_rows, 0, torch.ones(20, 2, _KV_HEADS, _HEAD_DIM))

    (group,) = plan.groups[GROUP].attention
    _, values = read_tiles(pool, 0, group)

    assert torch.equal(values[0, :, :20], torch.ones(_KV_HEADS, 20, _HEAD_DIM))
    assert bool(values.isfinite().all())


def test_a_long_chunk_is_cut_into_items_that_cover_every_row_once() -> None:
    pool = _make_pool(16)
    sequence = HandFedSequence("one", [0] * 1500, range(94))

    groups = _plan(pool, (sequence, 100)).groups[GROUP].attention

    rows = torch.cat([group.query_rows for group in groups])
    assert sorted(rows.tolist()) == list(range(1400))


@pytest.mark.parametrize("shape", [(4, 2, 2, 2, 16), (4, 2, 3, 2, 16, 8)])
def test_a_tensor_that_is_no_pool_is_refused_with_its_shape(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=rf"got \({shape[0]}, {shape[1]}"):
        PageLayout.of(torch.zeros(shape))


def test_a_pool_that_is_not_contiguous_is_refused() -> None:
    with pytest.raises(ValueError, match="contiguous"):
        PageLayout.of(torch.zeros(4, 2, 2, 2, 16, 8).transpose(3, 4))


@pytest.mark.parametrize("count", [1, 4, 9])
def test_products_in_calls_of_one_size_are_the_products(count: int) -> None:
    rows, matrices = torch.randn(count, 8, 16), torch.randn(count, 16, 4)

    out = multiply(rows, matrices, ProductRule(row_multiple=8, products_per_call=4))

    assert out.shape == (count, 8, 4)
    torch.testing.assert_close(out, torch.einsum("nri,nio->nro", rows, matrices))
