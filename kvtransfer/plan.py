"""Which bytes to copy from a peer's pool into ours, in as few runs as possible. Pure.

A page of slot s lies at byte offset + s * page_bytes of the registered memory, where offset and page_bytes are
its layer group's, and a page is contiguous (design, section 4). Neighbours on both sides move as one run:

    source slots       7  8  9      4          source       |--7--|--8--|--9--|      |--4--|
    destination slots  2  3  4      9    ->    destination  |--2--|--3--|--4--|      |--9--|
                                                             one run of 3 pages       one of 1

Where the two sides' pages have unlike shapes (block size, tensor-parallel degree), a destination page is filled from
the parts of the source pages that cover its positions (`relayout`), and neighbours merge as far as they can.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace

from kvtransfer.errors import HandshakeRefused, PeerError, TransferLogicError
from kvtransfer.messages import GroupLayout, PageCopy, PoolLayout, TransferTicket
from kvtransfer.relayout import page_shape, pieces
from manager import BlockOrdinal, LayerGroupId, PageLocation, TierLevel

_PageKey = tuple[BlockOrdinal, LayerGroupId]


def check_compatible(ours: PoolLayout, theirs: PoolLayout) -> None:
    """Compare two pools field by field.

    Raises:
        HandshakeRefused: they do not fit; the message names the first such field and both values (C18).
    """
    for field in fields(PoolLayout):
        our_value, their_value = getattr(ours, field.name), getattr(theirs, field.name)
        if field.name == "tokens_per_block":
            fits = not max(our_value, their_value) % min(our_value, their_value)
        elif field.name == "groups":
            fits = _groups_fit(ours, theirs)
        else:
            fits = not field.compare or our_value == their_value
        if not fits:
            msg = f"pools do not fit: {field.name} is {our_value!r} here and {their_value!r} at the peer"
            raise HandshakeRefused(msg)
    if not _is_alike(ours, theirs):
        for layout in (ours, theirs):
            for group in layout.groups:
                page_shape(layout, group)


def plan_copies(ours: PoolLayout, ticket: TransferTicket, destinations: Sequence[PageLocation]) -> tuple[PageCopy, ...]:
    """The runs that fill `destinations` from the ticket's pages; blocks we do not name are skipped.

    Args:
        ours: where our pages lie.
        ticket: the peer's pages; its layout has passed `check_compatible`. Of a tensor-parallel owner, one rank's.
        destinations: our pages to fill, each block and layer group once, in any order. Of a windowed group these
            are what the window still shows at the prompt's end, whatever else the peer has leased.

    Returns:
        Runs that overlap nowhere in our pool, by source offset. Empty where `destinations` is, and where the two
        ranks share no head.

    Raises:
        PeerError: the ticket lacks a wanted page, or contradicts itself.
        TransferLogicError: `destinations` contradict themselves (a page or a slot twice, not on the device).
    """
    wanted = _own_offsets(ours, destinations)
    offered = _peer_offsets(ticket)
    copies = (_whole_pages if _is_alike(ours, ticket.layout) else _parts_of_pages)(ours, ticket, wanted, offered)
    return _coalesce(sorted(copies, key=lambda copy: copy.source_offset))


def _is_alike(ours: PoolLayout, theirs: PoolLayout) -> bool:
    """Whether pages move whole."""
    return (ours.tokens_per_block, ours.tp_degree, ours.tp_rank) == (
        theirs.tokens_per_block,
        theirs.tp_degree,
        theirs.tp_rank,
    )


def _groups_fit(ours: PoolLayout, theirs: PoolLayout) -> bool:
    if _is_alike(ours, theirs):
        return ours.groups == theirs.groups
    return [replace(group, page_bytes=0) for group in ours.groups] == [
        replace(group, page_bytes=0) for group in theirs.groups
    ]


def _whole_pages(
    ours: PoolLayout, ticket: TransferTicket, wanted: Mapping[_PageKey, int], offered: Mapping[_PageKey, int]
) -> list[PageCopy]:
    copies: list[PageCopy] = []
    for (block, layer_group), own_offset in wanted.items():
        peer_offset = offered.get((block, layer_group))
        if peer_offset is None or block * ticket.layout.tokens_per_block >= ticket.num_tokens:
            raise _missing(ticket, block, layer_group)
        copies.append(PageCopy(peer_offset, own_offset, ours.groups[layer_group].page_bytes))
    return copies


def _parts_of_pages(
    ours: PoolLayout, ticket: TransferTicket, wanted: Mapping[_PageKey, int], offered: Mapping[_PageKey, int]
) -> list[PageCopy]:
    theirs = ticket.layout
    size, their_size = ours.tokens_per_block, theirs.tokens_per_block
    shapes = [
        (page_shape(theirs, their_group), page_shape(ours, group))
        for their_group, group in zip(theirs.groups, ours.groups, strict=True)
    ]
    copies: list[PageCopy] = []
    for (block, layer_group), own_offset in wanted.items():
        first, end = block * size, min((block + 1) * size, ticket.num_tokens)
        if first >= end:
            raise _missing(ticket, block, layer_group)
        source, destination = shapes[layer_group]
        for their_block in range(first // their_size, -(-end // their_size)):
            start, stop = max(first, their_block * their_size), min(end, (their_block + 1) * their_size)
            peer_offset = offered.get((BlockOrdinal(their_block), layer_group))
            if peer_offset is None:
                if _is_out_of_sight(ours.groups[layer_group], start, stop, ticket.num_tokens):
                    continue
                raise _missing(ticket, block, layer_group)
            tokens = (start - their_block * their_size, start - first, stop - start)
            copies += [
                PageCopy(peer_offset + from_, own_offset + to, num_bytes)
                for from_, to, num_bytes in pieces(source, destination, *tokens)
            ]
    return copies


def _is_out_of_sight(group: GroupLayout, start: int, stop: int, num_tokens: int) -> bool:
    """Whether no query after the prompt sees these positions: a side with smaller blocks frees them sooner."""
    return group.window is not None and start >= group.num_sink_tokens and stop <= num_tokens - group.window + 1


def _missing(ticket: TransferTicket, block: BlockOrdinal, layer_group: LayerGroupId) -> PeerError:
    return PeerError(
        f"lease {ticket.lease_id} of {ticket.owner} has {ticket.num_tokens} tokens "
        f"and no page for block {block}, layer group {layer_group}"
    )


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
