"""Builders of the transfer layer's values with small defaults."""

from collections.abc import Sequence

from configs import TransferConfig
from kvtransfer.messages import GroupLayout, MemoryDescription, PoolLayout, TransferTicket
from manager import (
    BlockOrdinal,
    Epoch,
    LayerGroupId,
    LeaseId,
    PageLease,
    PageLocation,
    RequestId,
    SlotId,
    TierLevel,
    WorkerName,
)

PAGE_BYTES = 64
TOKENS_PER_BLOCK = 4
LAYOUT = PoolLayout(
    model_fingerprint="tiny",
    num_kv_heads=1,
    head_dim=8,
    tokens_per_block=TOKENS_PER_BLOCK,
    dtype="uint8",
    groups=(GroupLayout((0,), None, 0, PAGE_BYTES), GroupLayout((1,), 8, 0, PAGE_BYTES)),
    offsets=(0, 0),
    exactness_class="native-1",
)
CONFIG = TransferConfig(lease_duration_s=10.0, heartbeat_s=0.5, agent_poll_s=0.002)
EPOCH = Epoch(7)
OWNER = WorkerName("context-0")
READER = WorkerName("generation-0")


def page(block: int, slot: int, layer_group: int = 0, tier: TierLevel = TierLevel.DEVICE) -> PageLocation:
    """One page."""
    return PageLocation(BlockOrdinal(block), LayerGroupId(layer_group), SlotId(slot), tier)


def pages(slots: Sequence[int]) -> tuple[PageLocation, ...]:
    """Blocks 0, 1, 2, ... in these slots."""
    return tuple(page(block, slot) for block, slot in enumerate(slots))


def lease(slots: Sequence[int] = (0, 1), lease_id: int = 1, epoch: Epoch = EPOCH) -> PageLease:
    """Full blocks in these slots."""
    request_id = RequestId(f"context-attempt-{lease_id}")
    return PageLease(LeaseId(lease_id), epoch, request_id, len(slots) * TOKENS_PER_BLOCK, pages(slots))


def ticket(held: PageLease, memory: MemoryDescription | None = None, layout: PoolLayout = LAYOUT) -> TransferTicket:
    """A ticket for `held` by `OWNER`."""
    return TransferTicket(OWNER, held, layout, memory or MemoryDescription("inprocess", {"name": OWNER, "life": 1}))
