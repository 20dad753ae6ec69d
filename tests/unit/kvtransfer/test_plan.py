"""Pages to runs of bytes, and the handshake."""

import dataclasses
import re

import pytest

from kvtransfer.errors import HandshakeRefused, PeerError, TransferLogicError
from kvtransfer.messages import GroupLayout, PageCopy, PoolLayout
from kvtransfer.plan import check_compatible, plan_copies
from manager import LayerGroupId, PageLease, PageLocation, TierLevel
from tests.fakes.transfer_values import LAYOUT, PAGE_BYTES, lease, page, pages, ticket


def runs(source_slots: tuple[int, ...], destinations: tuple[PageLocation, ...]) -> list[tuple[int, int, int]]:
    """The plan in pages: (source slot, destination slot, pages)."""
    copies = plan_copies(LAYOUT, ticket(lease(source_slots)), destinations)
    for copy in copies:
        assert not copy.source_offset % PAGE_BYTES
        assert not copy.num_bytes % PAGE_BYTES
    return [
        (c.source_offset // PAGE_BYTES, c.destination_offset // PAGE_BYTES, c.num_bytes // PAGE_BYTES) for c in copies
    ]


def test_pages_adjacent_on_both_sides_move_as_one_run() -> None:
    assert runs((7, 8, 9, 4), pages((2, 3, 4, 9))) == [(4, 9, 1), (7, 2, 3)]


def test_pages_adjacent_on_one_side_only_stay_apart() -> None:
    assert runs((7, 8), pages((2, 4))) == [(7, 2, 1), (8, 4, 1)]
    assert runs((7, 9), pages((2, 3))) == [(7, 2, 1), (9, 3, 1)]
    assert runs((7, 8), pages((3, 2))) == [(7, 3, 1), (8, 2, 1)]


def test_neighbours_merge_whatever_order_they_are_named_in() -> None:
    assert runs((9, 8, 7), pages((4, 3, 2))) == [(7, 2, 3)]
    assert runs((7, 8, 9), tuple(reversed(pages((2, 3, 4))))) == [(7, 2, 3)]


def test_blocks_that_the_receiver_does_not_name_are_skipped() -> None:
    assert runs((7, 8, 9), (page(2, 5),)) == [(9, 5, 1)]
    assert runs((7, 8, 9), (page(0, 5), page(2, 6))) == [(7, 5, 1), (9, 6, 1)]
    assert runs((7, 8, 9), ()) == []


def test_layer_groups_of_one_block_are_told_apart() -> None:
    held = lease((0,))
    both = dataclasses.replace(held, pages=(page(0, 3, layer_group=0), page(0, 8, layer_group=1)))
    assert plan_copies(LAYOUT, ticket(both), [page(0, 1, layer_group=1)]) == (
        PageCopy(8 * PAGE_BYTES, PAGE_BYTES, PAGE_BYTES),
    )


def test_a_ticket_that_lacks_a_wanted_page_is_refused_by_block() -> None:
    with pytest.raises(PeerError, match="no page for block 2, layer group 0"):
        plan_copies(LAYOUT, ticket(lease((7, 8))), pages((1, 2, 3)))


def test_a_page_beyond_the_tickets_tokens_is_refused() -> None:
    """The slot is there and its content is not: the context never computed those positions."""
    short = dataclasses.replace(lease((7, 8)), num_tokens=LAYOUT.tokens_per_block)
    with pytest.raises(PeerError, match="has 4 tokens and no page for block 1"):
        plan_copies(LAYOUT, ticket(short), pages((1, 2)))


@pytest.mark.parametrize(
    ("wrong_pages", "message"),
    [
        ((page(0, 3), page(0, 4)), "twice"),
        ((page(0, 3), page(1, 3)), "twice"),
        ((page(0, 3), page(1, 4, tier=TierLevel.HOST)), "outside the device pool"),
        ((page(0, -1), page(1, 4)), "outside the device pool"),
    ],
)
def test_a_ticket_that_contradicts_itself_is_refused(wrong_pages: tuple[PageLocation, ...], message: str) -> None:
    held: PageLease = dataclasses.replace(lease((3, 4)), pages=wrong_pages)
    with pytest.raises(PeerError, match=message):
        plan_copies(LAYOUT, ticket(held), [page(0, 1)])


@pytest.mark.parametrize(
    "wrong",
    [
        (page(0, 1), page(0, 2)),
        (page(0, 1), page(1, 1)),
        (page(0, 1, tier=TierLevel.HOST),),
        (page(0, -1),),
    ],
)
def test_destinations_that_contradict_themselves_are_a_bug_of_ours(wrong: tuple[PageLocation, ...]) -> None:
    with pytest.raises(TransferLogicError):
        plan_copies(LAYOUT, ticket(lease((3, 4))), wrong)


def test_equal_pools_are_compatible() -> None:
    check_compatible(LAYOUT, dataclasses.replace(LAYOUT))


_COMPARED = [field.name for field in dataclasses.fields(PoolLayout) if field.compare]


@pytest.mark.parametrize("field", [name for name in _COMPARED if name != "tokens_per_block"])
def test_the_handshake_names_the_field_that_differs(field: str) -> None:
    ours = getattr(LAYOUT, field)
    other = dataclasses.replace(LAYOUT, **{field: ours + ours})
    message = f"{field} is {ours!r} here and {ours + ours!r} at the peer"
    with pytest.raises(HandshakeRefused, match=re.escape(message)):
        check_compatible(LAYOUT, other)


def test_the_handshake_names_the_first_of_several_differing_fields() -> None:
    other = dataclasses.replace(LAYOUT, dtype="int8", num_kv_heads=3)
    with pytest.raises(HandshakeRefused, match="num_kv_heads"):
        check_compatible(LAYOUT, other)


def test_the_handshake_refuses_other_windows_and_names_them() -> None:
    full, windowed = LAYOUT.groups
    other = dataclasses.replace(LAYOUT, groups=(full, dataclasses.replace(windowed, window=12)))
    with pytest.raises(HandshakeRefused, match=r"groups is .*window=8.* here and .*window=12.* at the peer"):
        check_compatible(LAYOUT, other)


def test_block_sizes_must_differ_by_a_factor() -> None:
    with pytest.raises(HandshakeRefused, match="tokens_per_block is 4 here and 6 at the peer"):
        check_compatible(LAYOUT, dataclasses.replace(LAYOUT, tokens_per_block=6))


def test_pools_of_other_sizes_are_compatible() -> None:
    check_compatible(LAYOUT, dataclasses.replace(LAYOUT, offsets=(0, 4096)))


def _two_pools(second: int) -> PoolLayout:
    """Layer group 0 has pages of 64 bytes from byte 0, group 1 pages of 32 from byte `second`."""
    groups = (LAYOUT.groups[0], GroupLayout((1,), 8, 0, 32))
    return dataclasses.replace(LAYOUT, groups=groups, offsets=(0, second))


def test_each_layer_group_is_read_from_and_into_its_own_pool() -> None:
    held = dataclasses.replace(
        lease((7, 8)), pages=(page(0, 7), page(1, 8), page(0, 7, layer_group=1), page(1, 2, layer_group=1))
    )
    copies = plan_copies(
        _two_pools(1024),
        ticket(held, layout=_two_pools(640)),
        # Slot 5 twice: in two pools. Block 0 of group 1 has left our window and is not asked for.
        [page(0, 5), page(1, 6), page(1, 5, layer_group=1)],
    )
    assert copies == (PageCopy(7 * 64, 5 * 64, 2 * 64), PageCopy(640 + 2 * 32, 1024 + 5 * 32, 32))


def test_a_ticket_of_a_layer_group_that_is_not_there_is_refused() -> None:
    held = dataclasses.replace(lease((7,)), pages=(page(0, 7), page(0, 3, layer_group=LayerGroupId(5))))
    assert ticket(held).total_bytes == PAGE_BYTES
    with pytest.raises(PeerError, match="names layer group 5 for 2 layer groups"):
        plan_copies(LAYOUT, ticket(held), [page(0, 1)])
