"""What a call of the plan answers: a `Grant` with its whole cost (M5), or a typed `Refusal` (M2).

Neither has a truth value, so that `if manager.prepare_context(...)` cannot be written by mistake:
use `isinstance` or `match`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NoReturn

from manager.ids import PoolGroupId, RequestId, TierLevel


class RefusalReason(StrEnum):
    """Why nothing was given. A refused call has changed nothing (M1)."""

    OUT_OF_PAGES = "out_of_pages"
    OUT_OF_INDEX_SLOTS = "out_of_index_slots"
    OVER_RESUME_WATERMARK = "over_resume_watermark"
    OUT_OF_ADAPTER_PAGES = "out_of_adapter_pages"
    LOWER_TIERS_FULL = "lower_tiers_full"
    """No lower tier exists or can take the pages: only a recompute-pause frees them."""
    CANNOT_FORK = "cannot_fork"
    """The source has not, or not on the device, what its fork would share: claim a prefix instead."""
    NEVER_FITS = "never_fits"
    """More than the whole pool; waiting cannot help."""


@dataclass(slots=True, unsafe_hash=True)
class PageCost:
    """Pages of one pool group in one tier. A value, as `Grant` is."""

    pool_group: PoolGroupId
    tier: TierLevel
    pages: int


@dataclass(slots=True, unsafe_hash=True)
class Grant:
    """What one call gave to one request, and all that it uses (M5). A value: nobody changes it.

    Not declared frozen, because that triples the cost of making one, and every decode gets one every step.

    Attributes:
        request_id: the attempt that received it.
        pages: slots that left `free or evictable` for this request, per pool group and tier:
            new pages, and cached pages that the claim pinned. Page-rounded; draft slots included.
        tokens: logical positions that gained a place.
        reused_tokens: positions whose pages were found in the cache (prefix claim or resume).
        index_slots: 1 when the call took an index slot.
        adapter_pages: adapter pages made resident for it.
        history_length: positions already computed after the call; the engine continues here.
        capacity: positions that have a place after the call.
    """

    request_id: RequestId
    pages: tuple[PageCost, ...] = ()
    tokens: int = 0
    reused_tokens: int = 0
    index_slots: int = 0
    adapter_pages: int = 0
    history_length: int = 0
    capacity: int = 0

    def __bool__(self) -> NoReturn:
        """Refuse to be tested for truth."""
        msg = "a Grant has no truth value; use isinstance"
        raise TypeError(msg)

    def num_pages(self, tier: TierLevel = TierLevel.DEVICE) -> int:
        """Pages of every pool group in `tier`."""
        return sum(cost.pages for cost in self.pages if cost.tier == tier)


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a call gave nothing, with the numbers.

    Attributes:
        request_id: the attempt that asked.
        reason: which limit was hit.
        needed: units of that limit that the call needed.
        available: units that were there.
        pool_group: the pool group that was short, for OUT_OF_PAGES and LOWER_TIERS_FULL.
        numbers: further figures for the log.
    """

    request_id: RequestId
    reason: RefusalReason
    needed: int = 0
    available: int = 0
    pool_group: PoolGroupId | None = None
    numbers: Mapping[str, int] = field(default_factory=dict)

    def __bool__(self) -> NoReturn:
        """Refuse to be tested for truth."""
        msg = "a Refusal has no truth value; use isinstance"
        raise TypeError(msg)

    def __str__(self) -> str:
        """Name the request, the value and the limit."""
        where = "" if self.pool_group is None else f" in pool group {self.pool_group}"
        return f"{self.request_id}: {self.reason}{where}: needs {self.needed}, {self.available} available"
