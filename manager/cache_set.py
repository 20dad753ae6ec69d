"""`RequestCaches`: the caches of all requests of one worker, with their index slots.

Opens, grows, reverts and closes caches as whole requests. Knows no transaction kinds and no refusals'
wording; capacity questions are answered before anything changes.
"""

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

    def shortage(self, num_blocks: int, total_blocks: int) -> Shortage | None:
        """Whether `num_blocks` more, `total_blocks` in all, would not fit, and where."""
        for pool, groups in enumerate(self._groups_per_pool):
            slots = self._storage.slots[pool].num_slots
            if total_blocks * groups > slots:
                return Shortage(pool, total_blocks * groups, slots, is_final=True)
            available = self._storage.available(pool)
            if num_blocks * groups > available:
                return Shortage(pool, num_blocks * groups, available, is_final=False)
        return None

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
            cache.unclaim()
            self._forget(cache)
        for page in renamed:
            if not any(other.rename(page) for other in self.by_request.values()):
                msg = f"page {page} was moved aside but belongs to no cache"
                raise LogicError(msg)

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

    def _remove(self, request_id: RequestId) -> None:
        del self.by_request[request_id]
