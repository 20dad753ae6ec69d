"""Counts of a manager, as values: pages per tier, and what a plan may still take."""

from collections.abc import Mapping
from dataclasses import dataclass

from manager.ids import PoolGroupId, Tier


@dataclass(frozen=True, slots=True)
class PageCounts:
    """Slots of one tier, every pool group together. total = free + cached + in_use + quarantined.

    `leased` and `reserved` are counts on top: a leased page is also cached or in use, a reserved
    one (held for a transfer that is not activated yet) is also in use.
    """

    total: int = 0
    free: int = 0
    cached: int = 0
    in_use: int = 0
    leased: int = 0
    reserved: int = 0
    quarantined: int = 0


@dataclass(frozen=True, slots=True)
class ManagerStats:
    """A snapshot for reports; cheap enough to take every iteration.

    Attributes:
        tiers: page counts per configured tier.
        index_slots_total: `max_sequences`.
        index_slots_free: of those, not taken.
        prefix_queried_tokens: tokens of all prefix claims so far (cumulative, published only).
        prefix_hit_tokens: of those, found in the cache.
        suspensions: caches suspended or paused for recompute so far.
        rollbacks: transactions and savepoints rolled back so far, with reverts.
    """

    tiers: Mapping[Tier, PageCounts]
    index_slots_total: int
    index_slots_free: int
    prefix_queried_tokens: int
    prefix_hit_tokens: int
    suspensions: int
    rollbacks: int


@dataclass(frozen=True, slots=True)
class Availability:
    """What a plan may still take: the snapshot that the budget starts from (V14)."""

    pages: Mapping[PoolGroupId, int]
    """Device pages per pool group that are free, or cached and evictable."""
    index_slots: int
    adapter_pages: int
