"""Plans against a naive page-by-page copy."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtransfer.plan import plan_copies
from manager import PageLocation
from tests.fakes.transfer_values import LAYOUT, PAGE_BYTES, lease, page, ticket

NUM_SLOTS = 24


@st.composite
def wanted_pages(draw: st.DrawFn) -> tuple[tuple[int, ...], list[PageLocation]]:
    """Source slots by block, and destinations for some of the blocks in any order."""
    source_slots = draw(st.lists(st.integers(0, NUM_SLOTS - 1), unique=True, min_size=1))
    blocks = draw(st.lists(st.integers(0, len(source_slots) - 1), unique=True))
    slots = draw(
        st.lists(st.integers(0, NUM_SLOTS - 1), unique=True, min_size=len(blocks), max_size=len(blocks))
        # Runs of neighbours are what the plan is about and what random numbers seldom give.
        | st.integers(0, NUM_SLOTS - len(blocks)).map(lambda first: list(range(first, first + len(blocks))))
    )
    return tuple(source_slots), [page(block, slot) for block, slot in zip(blocks, slots, strict=True)]


@settings(max_examples=200, derandomize=True, deadline=None, database=None)
@given(wanted_pages())
def test_a_plan_moves_what_a_page_by_page_copy_moves_in_no_more_runs(
    wanted: tuple[tuple[int, ...], list[PageLocation]],
) -> None:
    source_slots, destinations = wanted
    source = np.random.default_rng(0).integers(0, 256, NUM_SLOTS * PAGE_BYTES, dtype=np.uint8)
    expected = np.zeros_like(source)
    for destination in destinations:
        first = source_slots[destination.block] * PAGE_BYTES
        expected[destination.slot * PAGE_BYTES :][:PAGE_BYTES] = source[first : first + PAGE_BYTES]

    copies = plan_copies(LAYOUT, ticket(lease(source_slots)), destinations)
    actual = np.zeros_like(source)
    for copy in copies:
        run = source[copy.source_offset : copy.source_offset + copy.num_bytes]
        actual[copy.destination_offset : copy.destination_offset + copy.num_bytes] = run
    assert np.array_equal(actual, expected)
    assert sum(copy.num_bytes for copy in copies) == len(destinations) * PAGE_BYTES

    pairs = {(source_slots[destination.block], destination.slot) for destination in destinations}
    # A run begins at exactly the pages whose predecessor on both sides does not move along with them.
    assert len(copies) == sum((source - 1, slot - 1) not in pairs for source, slot in pairs)
