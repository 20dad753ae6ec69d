"""Which bytes to copy from a peer's pool into ours, in as few runs as possible. Pure.

A page of slot s lies at byte s * page_bytes of its pool, and a page is contiguous (design, section 4).
Pages that are neighbours on both sides move as one run:

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
from manager import BlockOrdinal, LayerGroupId, PageLocation, SlotId, TierLevel

_PageKey = tuple[BlockOrdinal, LayerGroupId]


def check_compatible(ours: PoolLayout, theirs: PoolLayout) -> None:
    """Compare two pools field by field.

    Raises:
        HandshakeRefused: they differ; the message names the first such field and both values (C18).
    """
    for field in fields(PoolLayout):
        our_value, their_value = getattr(ours, field.name), getattr(theirs, field.name)
        if our_value != their_value:
            msg = f"pools do not fit: {field.name} is {our_value!r} here and {their_value!r} at the peer"
            raise HandshakeRefused(msg)


def plan_copies(ticket: TransferTicket, destinations: Sequence[PageLocation]) -> tuple[PageCopy, ...]:
    """The runs that fill `destinations` from the ticket's pages; blocks we do not name are skipped.

    Args:
        ticket: the peer's pages; its layout has passed `check_compatible`.
        destinations: our pages to fill, each block and layer group once, in any order.

    Returns:
        Runs that overlap nowhere in our pool, by source offset. Empty where `destinations` is.

    Raises:
        PeerError: the ticket lacks a wanted page, or contradicts itself.
        TransferLogicError: `destinations` contradict themselves (a page or a slot twice, not on the device).
    """
    wanted = _own_slots(destinations)
    offered = _peer_slots(ticket)
    pairs: list[tuple[SlotId, SlotId]] = []
    for (block, layer_group), own_slot in wanted.items():
        peer_slot = offered.get((block, layer_group))
        if peer_slot is None or block * ticket.layout.tokens_per_block >= ticket.num_tokens:
            msg = (
                f"lease {ticket.lease_id} of {ticket.owner} has {ticket.num_tokens} tokens "
                f"and no page for block {block}, layer group {layer_group}"
            )
            raise PeerError(msg)
        pairs.append((peer_slot, own_slot))
    return _coalesce(sorted(pairs), ticket.layout.page_bytes)


def _own_slots(destinations: Sequence[PageLocation]) -> Mapping[_PageKey, SlotId]:
    slots = {(page.block, page.layer_group): page.slot for page in destinations}
    if len(slots) != len(destinations) or len(set(slots.values())) != len(destinations):
        msg = f"{len(destinations)} destinations name {len(slots)} pages in {len(set(slots.values()))} slots"
        raise TransferLogicError(msg)
    off_device = [page for page in destinations if page.tier is not TierLevel.DEVICE or page.slot < 0]
    if off_device:
        msg = f"a destination must be a slot of the device pool, got {off_device[0]}"
        raise TransferLogicError(msg)
    return slots


def _peer_slots(ticket: TransferTicket) -> Mapping[_PageKey, SlotId]:
    pages = ticket.lease.pages
    slots = {(page.block, page.layer_group): page.slot for page in pages}
    if len(slots) != len(pages) or len(set(slots.values())) != len(pages):
        msg = f"lease {ticket.lease_id} of {ticket.owner} names a page or a slot twice"
        raise PeerError(msg)
    # Only the device pool is registered with a transport: any other slot number would read other bytes.
    off_device = [page for page in pages if page.tier is not TierLevel.DEVICE or page.slot < 0]
    if off_device:
        msg = f"lease {ticket.lease_id} of {ticket.owner} has a page outside the device pool: {off_device[0]}"
        raise PeerError(msg)
    return slots


def _coalesce(pairs: Sequence[tuple[SlotId, SlotId]], page_bytes: int) -> tuple[PageCopy, ...]:
    """Merge (source, destination) slot pairs, sorted by source, that are adjacent on both sides."""
    copies: list[PageCopy] = []
    first = 0
    for index in range(1, len(pairs) + 1):
        source, destination = pairs[first]
        length = index - first
        if index < len(pairs) and pairs[index] == (source + length, destination + length):
            continue
        copies.append(PageCopy(source * page_bytes, destination * page_bytes, length * page_bytes))
        first = index
    return tuple(copies)
