"""Pages between sides of unlike block size and tensor-parallel degree: byte for byte, and nothing beside."""

import dataclasses
import itertools

import numpy as np
import pytest

from kvtransfer.errors import HandshakeRefused, PeerError
from kvtransfer.messages import PoolLayout
from kvtransfer.plan import check_compatible, plan_copies
from tests.fakes.sided_pools import NUM_HEADS, NUM_TOKENS, SENTINEL, Side, known_bytes

SHAPES = list(itertools.product((1, 2, 4), (16, 32, 64)))
"""Tensor-parallel degree, tokens per block."""


def transfer(source: Side, destination: Side) -> None:
    """Every rank reads what it needs from every rank."""
    for reader, owner in itertools.product(range(destination.degree), range(source.degree)):
        ours = destination.layouts[reader]
        check_compatible(ours, source.layouts[owner])
        for copy in plan_copies(ours, source.ticket(owner, source.pages()), destination.pages()):
            part = source.memories[owner][copy.source_offset : copy.source_offset + copy.num_bytes]
            destination.memories[reader][copy.destination_offset : copy.destination_offset + copy.num_bytes] = part


@pytest.mark.parametrize(("owner", "reader"), list(itertools.product(SHAPES, SHAPES)))
def test_every_byte_of_every_pair_of_shapes_arrives_in_its_place(
    owner: tuple[int, int], reader: tuple[int, int]
) -> None:
    source, destination = Side(*owner, seed=1), Side(*reader, seed=2)
    content = known_bytes()
    source.put(content)
    transfer(source, destination)
    for expected, found in zip(content, destination.get(), strict=True):
        assert np.array_equal(found[:, :, :, :NUM_TOKENS], expected)
    # Slots that are no destination were not touched.
    for rank, memory in enumerate(destination.memories):
        for location in destination.pages():
            destination.page(rank, location)[:] = SENTINEL
        assert (memory == SENTINEL).all()


def test_positions_beyond_the_prompt_are_not_sent_between_unlike_sides() -> None:
    source, destination = Side(2, 16, seed=1), Side(1, 64, seed=2)
    source.put(known_bytes())
    transfer(source, destination)
    for found in destination.get():
        assert (found[:, :, :, NUM_TOKENS:] == SENTINEL).all()


@pytest.mark.parametrize(
    ("owner", "reader", "runs_per_group"),
    [
        ((1, 32), (1, 32), (1, 1)),  # the page
        ((1, 32), (2, 32), (2 * 2, 2 * 3)),  # for each layer's K and V, the heads of the rank
        ((1, 16), (1, 32), (2 * 2 * 2 * NUM_HEADS, 2 * 2 * 3 * NUM_HEADS)),  # two source pages; each head alone
    ],
)
def test_a_page_moves_in_as_few_runs_as_its_shapes_allow(
    owner: tuple[int, int], reader: tuple[int, int], runs_per_group: tuple[int, int]
) -> None:
    source, destination = Side(*owner, seed=1), Side(*reader, seed=2)
    ticket = source.ticket(0, source.pages())
    first = destination.pages(range(1))
    runs = [len(plan_copies(destination.layouts[0], ticket, [page])) for page in first]
    assert tuple(runs) == runs_per_group


def test_ranks_that_share_no_head_have_nothing_to_send() -> None:
    source, destination = Side(4, 16, seed=1), Side(2, 16, seed=2)
    assert plan_copies(destination.layouts[0], source.ticket(3, source.pages()), destination.pages()) == ()


def test_a_missing_source_page_is_refused_unless_no_query_sees_it_any_more() -> None:
    """Smaller blocks leave the window sooner than the larger block that covers them."""
    source, destination = Side(1, 16, seed=1, window=40), Side(1, 64, seed=2, window=40)
    first_seen = NUM_TOKENS - 40 + 1
    held = source.pages(range(first_seen // 16, source.num_blocks))
    wanted = destination.pages(range(first_seen // 64, destination.num_blocks))
    copies = plan_copies(destination.layouts[0], source.ticket(0, held), wanted)
    assert copies
    fewer = source.pages(range(first_seen // 16 + 1, source.num_blocks))
    with pytest.raises(PeerError, match="no page for block 1, layer group 0"):
        plan_copies(destination.layouts[0], source.ticket(0, fewer), wanted)


def test_a_page_beyond_the_tickets_tokens_is_refused_between_unlike_sides() -> None:
    source, destination = Side(1, 16, seed=1), Side(1, 32, seed=2)
    with pytest.raises(PeerError, match="has 60 tokens and no page for block 2"):
        plan_copies(
            destination.layouts[0], source.ticket(0, source.pages(), num_tokens=60), destination.pages(range(3))
        )


def _layout(**changes: object) -> PoolLayout:
    return dataclasses.replace(Side(1, 16, seed=1).layouts[0], **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("theirs", "name"),
    [
        (_layout(tp_degree=3), "tp_degree"),
        (_layout(tp_degree=2, tp_rank=2), "tp_degree"),
        (_layout(tp_degree=2), "page_bytes"),
        (_layout(tokens_per_block=24), "tokens_per_block"),
        (_layout(tokens_per_block=32, head_dim=4), "head_dim"),
    ],
)
def test_what_cannot_be_re_laid_out_is_refused_by_name(theirs: PoolLayout, name: str) -> None:
    with pytest.raises(HandshakeRefused, match=name):
        check_compatible(_layout(), theirs)


def test_pages_of_an_unknown_element_size_move_whole_or_not_at_all() -> None:
    ours = _layout(dtype="float4")
    check_compatible(ours, ours)
    with pytest.raises(HandshakeRefused, match="dtype"):
        check_compatible(ours, dataclasses.replace(ours, tp_degree=2))
