"""Where pages are: what the engine and the transfer need, without the manager's structures."""

from dataclasses import dataclass

from manager.ids import BlockOrdinal, Epoch, LayerGroupId, LeaseId, RequestId, SlotId, TierLevel


@dataclass(frozen=True, slots=True)
class PageLocation:
    """One page of one request: which block, of which layer group, in which slot."""

    block: BlockOrdinal
    layer_group: LayerGroupId
    slot: SlotId
    tier: TierLevel = TierLevel.DEVICE


@dataclass(frozen=True, slots=True)
class PageLease:
    """Pages held for a remote reader (M7). The holder's table keeps the deadline, not this value.

    Attributes:
        lease_id: unique within the epoch.
        epoch: the life of the worker that gave it.
        request_id: the attempt whose pages they are.
        num_tokens: positions [0, num_tokens) whose KV the pages contain.
        pages: every page of those positions, by block then layer group.
    """

    lease_id: LeaseId
    epoch: Epoch
    request_id: RequestId
    num_tokens: int
    pages: tuple[PageLocation, ...]
