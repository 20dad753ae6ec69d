"""`Planner`: what the calls of a plan decide, for one request at a time.

Answers capacity questions before anything changes, and turns what was taken into grants. The facade guards
the calls; the scheduler never sees this.
"""

from collections import Counter
from collections.abc import Sequence

from manager.cache_chain import CacheStatus
from manager.cache_request import CacheRequest
from manager.cache_set import RequestCaches, Shortage
from manager.errors import LogicError
from manager.geometry import CacheGeometry
from manager.grants import Grant, PageCost, Refusal, RefusalReason
from manager.ids import PoolGroupId, RequestId
from manager.kv_cache import KVCache
from manager.storage.journal import Journal
from manager.storage_manager import StorageManager
from manager.transaction import Before, CacheTransaction, TransactionDesk, TransactionKind


class Planner:
    """The plan's half of the manager."""

    __slots__ = ("_caches", "_desk", "_geometry", "_journal", "_storage", "_watermark")

    def __init__(
        self,
        geometry: CacheGeometry,
        storage: StorageManager,
        caches: RequestCaches,
        desk: TransactionDesk,
        journal: Journal,
        *,
        watermark: float,
    ) -> None:
        """`watermark`: share of the device above which nothing resumes."""
        self._geometry = geometry
        self._storage = storage
        self._caches = caches
        self._desk = desk
        self._journal = journal
        self._watermark = watermark

    @property
    def _plan(self) -> CacheTransaction:
        return self._desk.require(TransactionKind.PLAN)

    def prepare(self, request: CacheRequest) -> Grant | Refusal:
        """A cache that exists and is active, at its longest cached prefix."""
        cache = self._caches.by_request.get(request.request_id)
        if cache is not None:
            return self.grow(cache, 0) if cache.is_suspended else self._grant(cache)
        if not self._caches.index_slots.free:
            return self._no_index_slot(request)
        cache, costs = self._open_cache(request, len(request.token_ids) - 1, partial=True)
        return self._grant(cache, costs, reused_tokens=cache.history, index_slots=1)

    def suspend(self, request: CacheRequest) -> Grant | Refusal:
        """ACTIVE -> SUSPENDED, or LOWER_TIERS_FULL. Raises LogicError for a reservation."""
        cache = self._caches.active(request)
        if cache.is_reservation:
            msg = f"{request.request_id} is a reservation: its pages are being filled"
            raise LogicError(msg)
        short = self._caches.no_room_below(cache)
        if short is not None:
            return self._refuse(cache, RefusalReason.LOWER_TIERS_FULL, short)
        self._plan.note_stop(request.request_id)
        stores = Counter(self._storage.pages.store[page] for page in self._caches.suspend(cache))
        costs = tuple(self._page_cost(store, count) for store, count in sorted(stores.items()))
        return Grant(request.request_id, costs, history_length=cache.history, capacity=cache.capacity)

    def pause(self, request: CacheRequest) -> Grant:
        """Close the cache. Raises LogicError for a reservation."""
        cache = self._caches.get(request.request_id)
        if cache.is_reservation:
            msg = f"{request.request_id} is a reservation: quarantine or free it"
            raise LogicError(msg)
        self._plan.note_stop(request.request_id)
        self._caches.close(cache)
        return Grant(request.request_id)

    def reserve(self, request: CacheRequest) -> Grant | Refusal:
        """All that activation needs, or nothing. Raises LogicError when a cache exists."""
        if request.request_id in self._caches.by_request:
            msg = f"{request.request_id} has a cache already"
            raise LogicError(msg)
        mark = len(self._journal)
        num_tokens = request.prompt_length + 1 + request.num_draft_tokens
        if not self._caches.index_slots.free:
            return self._no_index_slot(request)
        # Whole blocks only: a transfer moves whole pages.
        cache, costs = self._open_cache(request, request.prompt_length, partial=False)
        cache.reserve(request.prompt_length)
        grown = self.grow(cache, num_tokens)
        if isinstance(grown, Refusal):
            self._journal.undo_to(mark)
            return grown
        for cost in grown.pages:
            costs[cost.pool_group] += cost.pages
        return self._grant(cache, costs, tokens=grown.tokens, reused_tokens=cache.history, index_slots=1)

    def _open_cache(self, request: CacheRequest, limit: int, *, partial: bool) -> tuple[KVCache, list[int]]:
        cache, costs = self._caches.open(request, limit, partial=partial)
        queried = len(request.token_ids)
        before = Before(cache.num_claimed, is_new=True, queried_tokens=queried, hit_tokens=cache.history)
        self._plan.note_grant(request.request_id, before)
        return cache, costs

    def grow(self, cache: KVCache, num_tokens: int) -> Grant | Refusal:
        """Resume where suspended, and grow to `num_tokens`; both or neither."""
        size, num_blocks = self._geometry.tokens_per_block, cache.num_blocks
        if num_tokens <= num_blocks * size and cache.status is CacheStatus.ACTIVE:
            # Every decode, at all but one step in `size`.
            return Grant(cache.request_id, (), 0, 0, 0, 0, cache.history, num_blocks * size)
        missing = max(0, -(-num_tokens // size) - num_blocks)
        if cache.status is CacheStatus.ACTIVE:
            costs = cache.growth_per_pool(missing)
            if self._caches.has_room(costs):
                self._plan.note_grant(cache.request_id, Before(num_blocks))
                cache.grow(missing)
                return self._grant(cache, costs, tokens=missing * size)
        return self._refuse_or_resume(cache, missing)

    def _refuse_or_resume(self, cache: KVCache, missing: int) -> Grant | Refusal:
        if cache.is_suspended and not self._caches.index_slots.free:
            return Refusal(cache.request_id, RefusalReason.OUT_OF_INDEX_SLOTS, needed=1, available=0)
        short = self._caches.never_fits(cache, missing)
        if short is not None:
            return self._refuse(cache, RefusalReason.NEVER_FITS, short)
        short = self._caches.shortage(cache, missing)
        if short is not None:
            return self._refuse(cache, RefusalReason.OUT_OF_PAGES, short)
        short = self._caches.over_watermark(cache, missing, self._watermark)
        if short is not None:
            return self._refuse(cache, RefusalReason.OVER_RESUME_WATERMARK, short)
        return self._resume_and_grow(cache, missing)

    def _resume_and_grow(self, cache: KVCache, missing: int) -> Grant:
        self._plan.note_grant(cache.request_id, Before(cache.num_blocks, is_resumed=True))
        costs = self._caches.resume(cache)
        growth = cache.growth_per_pool(missing)
        if missing:
            cache.grow(missing)
        costs = [old + new for old, new in zip(costs, growth, strict=True)]
        tokens = missing * self._geometry.tokens_per_block
        return self._grant(cache, costs, tokens=tokens, reused_tokens=cache.history, index_slots=1)

    def revert(self, request_id: RequestId) -> None:
        """Undo the request's grants of this plan. Raises LogicError when it was suspended or paused in it."""
        transaction = self._plan
        before = transaction.forget_grant(request_id)
        if before is not None:
            self._caches.revert(self._caches.get(request_id), before)
            self._desk.rollbacks += 1
        elif request_id in transaction.stopped:
            msg = f"{request_id} was suspended or paused in this plan; its pages may have been granted on"
            raise LogicError(msg)

    def _refuse(self, cache: KVCache, reason: RefusalReason, short: Shortage) -> Refusal:
        return Refusal(cache.request_id, reason, short.needed, short.available, PoolGroupId(short.pool_group))

    def _page_cost(self, store: int, count: int) -> PageCost:
        tier, pool = divmod(store, len(self._geometry.pool_groups))
        return PageCost(PoolGroupId(pool), self._geometry.tiers[tier], count)

    def _no_index_slot(self, request: CacheRequest) -> Refusal:
        return Refusal(request.request_id, RefusalReason.OUT_OF_INDEX_SLOTS, needed=1, available=0)

    def _grant(
        self,
        cache: KVCache,
        costs: Sequence[int] = (),
        *,
        tokens: int = 0,
        reused_tokens: int = 0,
        index_slots: int = 0,
    ) -> Grant:
        pages = tuple([self._page_cost(pool, cost) for pool, cost in enumerate(costs) if cost])
        return Grant(cache.request_id, pages, tokens, reused_tokens, index_slots, 0, cache.history, cache.capacity)
