"""Which bytes to copy from a peer's pool into ours, in as few runs as possible. Pure.

A page of slot s lies at byte offset + s * page_bytes of the registered memory, where offset and page_bytes are
its layer group's, and a page is contiguous (design, section 4). Neighbours on both sides move as one run:

    source slots       7  8  9      4          source       |--7--|--8--|--9--|      |--4--|
    destination slots  2  3  4      9    ->    destination  |--2--|--3--|--4--|      |--9--|
                                                             one run of 3 pages       one of 1

Refuses to re-lay pages out: two sides whose tensor-parallel degree or block size differ are refused by
`check_compatible`. Where they may differ one day, `plan_copies` is the function that cuts a page into
the pieces that both sides have in one run; everything above and below it only sees `PageCopy`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields

from kvtransfer.errors import HandshakeRefused, PeerError, TransferLogicError
from kvtransfer.messages import PageCopy, PoolLayout, TransferTicket
from manager import BlockOrdinal, LayerGroupId, PageLocation, TierLevel

_PageKey = tuple[BlockOrdinal, LayerGroupId]


def check_compatible(ours: PoolLayout, theirs: PoolLayout) -> None:
    """Compare two pools field by field.

    Raises:
        HandshakeRefused: they differ; the message names the first such field and both values (C18).
    """
    for field in fields(PoolLayout):
        if not field.compare:
            continue
        our_value, their_value = getattr(ours, field.name), getattr(theirs, field.name)
        if our_value != their_value:
            msg = f"pools do not fit: {field.name} is {our_value!r} here and {their_value!r} at the peer"
            raise HandshakeRefused(msg)


def plan_copies(ours: PoolLayout, ticket: TransferTicket, destinations: Sequence[PageLocation]) -> tuple[PageCopy, ...]:
    """The runs that fill `destinations` from the ticket's pages; blocks we do not name are skipped.

    Args:
        ours: where our pages lie.
        ticket: the peer's pages; its layout has passed `check_compatible`.
        destinations: our pages to fill, each block and layer group once, in any order. Of a windowed group these
            are what the window still shows at the prompt's end, whatever else the peer has leased.

    Returns:
        Runs that overlap nowhere in our pool, by source offset. Empty where `destinations` is.

    Raises:
        PeerError: the ticket lacks a wanted page, or contradicts itself.
        TransferLogicError: `destinations` contradict themselves (a page or a slot twice, not on the device).
    """
    wanted = _own_offsets(ours, destinations)
    offered = _peer_offsets(ticket)
    copies: list[PageCopy] = []
    for (block, layer_group), own_offset in wanted.items():
        peer_offset = offered.get((block, layer_group))
        if peer_offset is None or block * ticket.layout.tokens_per_block >= ticket.num_tokens:
            msg = (
                f"lease {ticket.lease_id} of {ticket.owner} has {ticket.num_tokens} tokens "
                f"and no page for block {block}, layer group {layer_group}"
            )
            raise PeerError(msg)
        copies.append(PageCopy(peer_offset, own_offset, ours.groups[layer_group].page_bytes))
    return _coalesce(sorted(copies, key=lambda copy: copy.source_offset))


def _own_offsets(ours: PoolLayout, destinations: Sequence[PageLocation]) -> Mapping[_PageKey, int]:
    offsets = _offsets(ours, destinations)
    if len(offsets) != len(destinations) or len(set(offsets.values())) != len(destinations):
        msg = f"{len(destinations)} destinations name {len(offsets)} pages in {len(set(offsets.values()))} slots"
        raise TransferLogicError(msg)
    off_device = [page for page in destinations if page.tier is not TierLevel.DEVICE or page.slot < 0]
    if off_device:
        msg = f"a destination must be a slot of the device pool, got {off_device[0]}"
        raise TransferLogicError(msg)
    return offsets


def _peer_offsets(ticket: TransferTicket) -> Mapping[_PageKey, int]:
    pages, theirs = ticket.lease.pages, ticket.layout
    unknown = [page for page in pages if not 0 <= page.layer_group < len(theirs.groups)]
    if unknown or len(theirs.offsets) != len(theirs.groups):
        named = f"layer group {unknown[0].layer_group}" if unknown else f"{len(theirs.offsets)} offsets"
        msg = f"lease {ticket.lease_id} of {ticket.owner} names {named} for {len(theirs.groups)} layer groups"
        raise PeerError(msg)
    offsets = _offsets(theirs, pages)
    if len(offsets) != len(pages) or len(set(offsets.values())) != len(pages):
        msg = f"lease {ticket.lease_id} of {ticket.owner} names a page or a slot twice"
        raise PeerError(msg)
    # Only the device pool is registered with a transport: any other slot number would read other bytes.
    off_device = [page for page in pages if page.tier is not TierLevel.DEVICE or page.slot < 0]
    if off_device:
        msg = f"lease {ticket.lease_id} of {ticket.owner} has a page outside the device pool: {off_device[0]}"
        raise PeerError(msg)
    return offsets


def _offsets(layout: PoolLayout, pages: Sequence[PageLocation]) -> dict[_PageKey, int]:
    """Byte offset of each page in the memory of its side."""
    return {
        (page.block, page.layer_group): layout.offsets[page.layer_group]
        + page.slot * layout.groups[page.layer_group].page_bytes
        for page in pages
    }


def _coalesce(copies: Sequence[PageCopy]) -> tuple[PageCopy, ...]:
    """Merge copies, sorted by source, that are adjacent on both sides."""
    runs: list[PageCopy] = []
    for copy in copies:
        last = runs[-1] if runs else None
        if (
            last is not None
            and copy.source_offset == last.source_offset + last.num_bytes
            and copy.destination_offset == last.destination_offset + last.num_bytes
        ):
            runs[-1] = PageCopy(last.source_offset, last.destination_offset, last.num_bytes + copy.num_bytes)
        else:
            runs.append(copy)
    return tuple(runs)
