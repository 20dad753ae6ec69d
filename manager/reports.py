"""What a manager says of itself in numbers, for metrics and heartbeats."""

from manager.ids import Tier
from manager.page import NONE
from manager.snapshot import ManagerParts
from manager.stats import ManagerStats, PageCounts


def count(parts: ManagerParts, *, rollbacks: int) -> ManagerStats:
    """Counts of now; of prefix claims and suspensions, what was published."""
    return ManagerStats(
        tiers={Tier[level.name]: _of_tier(parts, place) for place, level in enumerate(parts.geometry.tiers)},
        index_slots_total=parts.index_slots.num_slots,
        index_slots_free=len(parts.index_slots.free),
        prefix_queried_tokens=parts.counts.queried_tokens,
        prefix_hit_tokens=parts.counts.hit_tokens,
        suspensions=parts.counts.suspensions,
        rollbacks=rollbacks,
    )


def _of_tier(parts: ManagerParts, place: int) -> PageCounts:
    total, free, cached = parts.storage.counts(place)
    if place:
        return PageCounts(total, free, cached, total - free - cached)
    quarantined = parts.quarantine.num_pages
    return PageCounts(
        total=total,
        free=free,
        cached=cached,
        in_use=total - free - cached - quarantined,
        leased=parts.leases.num_pages,
        reserved=_num_reserved_pages(parts),
        quarantined=quarantined,
    )


def _num_reserved_pages(parts: ManagerParts) -> int:
    """New pages of caches that wait for a transfer."""
    return sum(
        page != NONE
        for caches in parts.caches.values()
        if caches.is_reservation
        for member in caches.members
        for pages in member.pages
        for page in pages[member.num_claimed :]
    )
