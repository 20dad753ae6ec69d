"""`RequestCaches`: the caches of all requests of one worker, with their index slots.

Opens, grows, reverts and closes caches as whole requests. Knows no transaction kinds and no refusals'
wording; capacity questions are answered before anything changes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from manager.cache_request import CacheRequest
from manager.errors import LogicError
from manager.geometry import CacheGeometry
from manager.ids import RequestId
from manager.kv_cache import KVCache
from manager.page import NONE
from manager.radix_tree import BlockDigests
from manager.storage.journal import Journal
from manager.storage.slots import SlotAllocator
from manager.storage_manager import StorageManager
from manager.transaction import Before


@dataclass(frozen=True, slots=True)
class Shortage:
    """Pages that a growth needs and does not find."""

    pool_group: int
    needed: int
    available: int
    is_final: bool
    """More than the whole pool group has: waiting cannot help."""


class RequestCaches:
    """Caches by request.

    Attributes:
        by_request: every cache that exists.
        index_slots: rows of the per-sequence tables.
    """

    __slots__ = ("_geometry", "_groups_per_pool", "_journal", "_reuse", "_storage", "by_request", "index_slots")

    def __init__(
        self, geometry: CacheGeometry, storage: StorageManager, journal: Journal, max_sequences: int, *, reuse: bool
    ) -> None:
        """No caches yet; `reuse` allows prefix claims."""
        self._geometry = geometry
        self._storage = storage
        self._journal = journal
        self._reuse = reuse
        self._groups_per_pool = [len(pool.layer_group_ids) for pool in geometry.pool_groups]
        self.by_request: dict[RequestId, KVCache] = {}
        self.index_slots = SlotAllocator(max_sequences, journal)

    def get(self, request_id: RequestId) -> KVCache:
        """The request's cache.

        Raises:
            LogicError: it has none.
        """
        cache = self.by_request.get(request_id)
        if cache is None:
            msg = f"{request_id} has no cache"
            raise LogicError(msg)
        return cache

    def active(self, request: CacheRequest) -> KVCache:
        """The request's cache.

        Raises:
            LogicError: it has none, or it is suspended.
        """
        cache = self.get(request.request_id)
        if cache.is_suspended:
            msg = f"{request.request_id} is suspended"
            raise LogicError(msg)
        return cache

    def reservation(self, request_id: RequestId) -> KVCache:
        """The request's cache.

        Raises:
            LogicError: it has none, or does not wait for a transfer.
        """
        cache = self.get(request_id)
        if not cache.is_reservation:
            msg = f"{request_id} is no reservation"
            raise LogicError(msg)
        return cache

    def open(self, request: CacheRequest, max_blocks: int) -> tuple[KVCache, list[int]]:
        """Make a cache: an index slot, and the longest cached prefix of at most `max_blocks` blocks.

        Returns:
            The cache, and per pool group the pages that were cached until now.
        """
        digests = BlockDigests(request.reuse_scope, self._geometry.tokens_per_block)
        cache = KVCache(request.request_id, digests, self._geometry, self._storage, self._journal)
        cache.priority = request.priority
        cache.index_slot = self.index_slots.take(1)[0]
        costs = cache.claim_prefix(request.token_ids, max_blocks if self._reuse else 0)
        self.by_request[request.request_id] = cache
        self._journal.push((self._remove, (request.request_id,)))
        return cache, costs

    def shortage(self, cache: KVCache, num_blocks: int) -> Shortage | None:
        """Whether bringing the cache to the device and `num_blocks` more would not fit, and where."""
        total, below = cache.num_blocks + num_blocks, cache.pages_below() if cache.is_suspended else None
        for pool, groups in enumerate(self._groups_per_pool):
            slots = self._storage.slots[pool].num_slots
            if total * groups > slots:
                return Shortage(pool, total * groups, slots, is_final=True)
            needed = num_blocks * groups + (below[pool] if below else 0)
            available = self._storage.available(pool)
            if needed > available:
                return Shortage(pool, needed, available, is_final=False)
        return None

    def over_watermark(self, cache: KVCache, num_blocks: int, watermark: float) -> Shortage | None:
        """Whether resuming would leave more of the device in use than `watermark`; never while nothing runs."""
        if not cache.is_suspended or all(other.is_suspended for other in self.by_request.values()):
            return None
        below = cache.pages_below()
        for pool, groups in enumerate(self._groups_per_pool):
            needed = num_blocks * groups + below[pool]
            slots = self._storage.slots[pool].num_slots
            allowed = int(slots * watermark) - (slots - self._storage.available(pool))
            if needed > allowed:
                return Shortage(pool, needed, max(0, allowed), is_final=False)
        return None

    def having(self, pages: Sequence[int]) -> list[KVCache]:
        """Caches with at least one of these pages; slow."""
        wanted = set(pages)
        return [cache for cache in self.by_request.values() if any(wanted & set(group) for group in cache.pages)]

    def no_room_below(self, cache: KVCache) -> Shortage | None:
        """Whether the lower tiers cannot take what a suspension moves, and where."""
        needed = [0] * len(self._groups_per_pool)
        for group, pages in enumerate(cache.pages):
            kept = [page for page in pages[: cache.num_history_blocks] if page != NONE]
            needed[self._storage.pool_group_of[group]] += self._storage.num_to_move(kept)
        for pool, pages_needed in enumerate(needed):
            room = self._storage.moves.lower_room(pool)
            if pages_needed > room or not self._storage.has_lower_tiers:
                return Shortage(pool, pages_needed, room, is_final=False)
        return None

    def suspend(self, cache: KVCache) -> list[int]:
        """Suspend a cache that `no_room_below` had nothing against; returns the pages moved down."""
        moved = cache.suspend()
        self.index_slots.give((cache.index_slot,))
        self._set_index_slot(cache, NONE)
        return moved

    def resume(self, cache: KVCache) -> list[int]:
        """Resume a cache that `shortage` had nothing against; returns device slots taken per pool group."""
        self._set_index_slot(cache, self.index_slots.take(1)[0])
        return cache.resume()

    def grow(self, cache: KVCache, num_blocks: int) -> list[int]:
        """Add blocks that `shortage` had nothing against; returns new pages per pool group."""
        cache.grow(num_blocks)
        return [num_blocks * groups for groups in self._groups_per_pool]

    def close(self, cache: KVCache) -> None:
        """Release everything; committed blocks stay cached."""
        cache.release()
        self._forget(cache)

    def revert(self, cache: KVCache, before: Before) -> None:
        """Take the cache back to what it was before this plan."""
        renamed = cache.ungrow(before.num_blocks)
        if before.is_new:
            renamed += cache.unclaim()
            self._forget(cache)
        elif before.is_resumed:
            renamed += cache.unresume()
            self.index_slots.give((cache.index_slot,))
            self._set_index_slot(cache, NONE)
        for page in renamed:
            for other in self.by_request.values():
                other.rename(page)

    @property
    def num_reserved_pages(self) -> int:
        """New pages of caches that wait for a transfer."""
        waiting = (cache for cache in self.by_request.values() if cache.is_reservation)
        return sum((cache.num_blocks - cache.num_claimed) * len(cache.pages) for cache in waiting)

    def _forget(self, cache: KVCache) -> None:
        del self.by_request[cache.request_id]
        self._journal.push((self.by_request.__setitem__, (cache.request_id, cache)))
        if cache.index_slot != NONE:
            self.index_slots.give((cache.index_slot,))

    def _set_index_slot(self, cache: KVCache, index_slot: int) -> None:
        self._journal.push((self._put_index_slot, (cache, cache.index_slot)))
        cache.index_slot = index_slot

    def _put_index_slot(self, cache: KVCache, index_slot: int) -> None:
        cache.index_slot = index_slot

    def _remove(self, request_id: RequestId) -> None:
        del self.by_request[request_id]
