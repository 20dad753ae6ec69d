"""`KVCacheManagerV2`: the pages of one worker, changed only in transactions (design M1 to M7).

The scheduler and the loop call nothing else. Refuses to know steps, tensors, clocks and peers: deadlines of
leases and reservations are the agent's, which calls `end_lease`, `quarantine` and `free_resources` here.

How a call keeps the strong guarantee (M1): whatever is changed pushes its inverse to the journal first
or in the same breath; a call that raises is undone to where it began, and a refusal is decided before anything
changes or undone likewise.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from configs import KVCacheConfig
from manager.audit import ManagerParts, ManagerSnapshot, audit, take_snapshot
from manager.cache_request import CacheRequest
from manager.cache_set import RequestCaches
from manager.errors import LogicError
from manager.geometry import CacheGeometry
from manager.grants import Grant, PageCost, Refusal, RefusalReason
from manager.ids import (
    Epoch,
    IndexSlot,
    LayerGroupId,
    LeaseId,
    PoolGroupId,
    RequestId,
    Tier,
    TierLevel,
)
from manager.interface import Availability, ManagerStats, PageCounts
from manager.kv_cache import CacheStatus, KVCache
from manager.lease import HeldPages, LeaseTable, QuarantineTable
from manager.page import NONE, PageState
from manager.page_location import PageLease, PageLocation
from manager.storage.journal import Journal
from manager.storage_manager import StorageManager
from manager.transaction import Before, CacheTransaction, TransactionDesk, TransactionKind, inside

_in_plan = inside(TransactionKind.PLAN)
_in_complete = inside(TransactionKind.COMPLETE)


class KVCacheManagerV2:
    """Implements `manager.interface.KVCacheManager`; one thread only.

    Attributes:
        geometry: sizes.
        epoch: this life of the worker, carried by its leases.
        journal: undo log of the open transaction.
    """

    def __init__(self, geometry: CacheGeometry, config: KVCacheConfig, epoch: Epoch = Epoch(1)) -> None:  # noqa: B008 - a NewType of int
        """Every page is free."""
        self.geometry = geometry
        self.epoch = epoch
        self.journal = Journal()
        self._config = config
        self._storage = StorageManager(geometry, self.journal)
        self._caches = RequestCaches(
            geometry, self._storage, self.journal, config.max_sequences, reuse=config.enable_block_reuse
        )
        self._leases = LeaseTable(self.journal)
        self._quarantine = QuarantineTable(self.journal)
        self._desk = TransactionDesk(self.journal, self._storage)

    @property
    def max_request_tokens(self) -> int:
        """Longest request that can ever run here, prompt and output together."""
        return self.geometry.max_request_tokens

    # -- transactions ------------------------------------------------------------------------------

    def begin_plan(self) -> CacheTransaction:
        """Open a plan. Raises LogicError when a transaction is open."""
        return self._desk.begin(TransactionKind.PLAN)

    def begin_complete(self) -> CacheTransaction:
        """Open a complete. Raises LogicError when a transaction is open."""
        return self._desk.begin(TransactionKind.COMPLETE)

    def require(self, kind: TransactionKind) -> CacheTransaction:
        """The open transaction. Raises LogicError when it is of another kind, or none is open."""
        return self._desk.require(kind)

    # -- plan --------------------------------------------------------------------------------------

    @_in_plan
    def prepare_context(self, request: CacheRequest) -> Grant | Refusal:
        """See `KVCacheManager.prepare_context`."""
        cache = self._caches.by_request.get(request.request_id)
        if cache is not None:
            return self._grant(cache)
        if not self._caches.index_slots.free:
            return self._no_index_slot(request)
        queried = len(request.token_ids)
        cache, costs = self._open_cache(request, (queried - 1) // self.geometry.tokens_per_block, queried)
        return self._grant(cache, costs, reused_tokens=cache.history, index_slots=1)

    @_in_plan
    def resize_context(self, request: CacheRequest, num_tokens: int) -> Grant | Refusal:
        """See `KVCacheManager.resize_context`."""
        cache = self._active(request)
        return self._grow(cache, cache.history + num_tokens)

    @_in_plan
    def try_allocate_generation(self, request: CacheRequest) -> Grant | Refusal:
        """See `KVCacheManager.try_allocate_generation`."""
        return self._grow(self._active(request), len(request.token_ids) + request.num_draft_tokens)

    @_in_plan
    def suspend_request(self, request: CacheRequest) -> Grant | Refusal:
        """See `KVCacheManager.suspend_request`. Without a lower tier every suspension is refused."""
        cache = self._active(request)
        needed = sum(page != NONE for page in cache.pages[0])
        return Refusal(request.request_id, RefusalReason.LOWER_TIERS_FULL, needed, 0, PoolGroupId(0))

    @_in_plan
    def pause_for_recompute(self, request: CacheRequest) -> Grant:
        """See `KVCacheManager.pause_for_recompute`."""
        cache = self._caches.get(request.request_id)
        if cache.is_reservation:
            msg = f"{request.request_id} is a reservation: quarantine or free it"
            raise LogicError(msg)
        self.require(TransactionKind.PLAN).note_stop(request.request_id)
        self._caches.close(cache)
        return Grant(request.request_id)

    @_in_plan
    def prepare_disagg_gen_init(self, request: CacheRequest) -> Grant | Refusal:
        """See `KVCacheManager.prepare_disagg_gen_init`."""
        if request.request_id in self._caches.by_request:
            msg = f"{request.request_id} has a cache already"
            raise LogicError(msg)
        mark, size = len(self.journal), self.geometry.tokens_per_block
        num_tokens = request.prompt_length + 1 + request.num_draft_tokens
        if not self._caches.index_slots.free:
            return self._no_index_slot(request)
        cache, costs = self._open_cache(request, request.prompt_length // size, request.prompt_length)
        cache.reserve(request.prompt_length)
        grown = self._grow(cache, num_tokens)
        if isinstance(grown, Refusal):
            self.journal.undo_to(mark)
            return grown
        for cost in grown.pages:
            costs[cost.pool_group] += cost.pages
        return self._grant(cache, costs, tokens=grown.tokens, reused_tokens=cache.history, index_slots=1)

    @_in_plan
    def revert_allocate_context(self, request: CacheRequest) -> None:
        """See `KVCacheManager.revert_allocate_context`."""
        self._revert(request.request_id)

    @_in_plan
    def revert_allocate_generation(self, request: CacheRequest) -> None:
        """See `KVCacheManager.revert_allocate_generation`."""
        self._revert(request.request_id)

    # -- complete ----------------------------------------------------------------------------------

    @_in_complete
    def advance(self, request: CacheRequest, num_tokens: int) -> None:
        """See `KVCacheManager.advance`. Raises LogicError beyond capacity or the known tokens."""
        cache = self._active(request)
        if num_tokens < 0 or cache.is_reservation:
            msg = f"{request.request_id}: cannot advance by {num_tokens}, reservation={cache.is_reservation}"
            raise LogicError(msg)
        history = cache.history + num_tokens
        cache.advance(request.token_ids, history, reuse=self._config.enable_block_reuse)

    @_in_complete
    def rewind(self, request: CacheRequest, num_tokens: int) -> None:
        """See `KVCacheManager.rewind`. Raises LogicError for committed positions."""
        self._active(request).rewind(num_tokens)

    @_in_complete
    def activate_disagg_gen(self, request: CacheRequest) -> None:
        """See `KVCacheManager.activate_disagg_gen`."""
        cache = self._reservation(request.request_id)
        num_tokens = cache.reserved_tokens
        cache.reserve(0)
        cache.advance(request.token_ids, num_tokens, reuse=self._config.enable_block_reuse)

    @_in_complete
    def grant_lease(self, request: CacheRequest) -> PageLease:
        """See `KVCacheManager.grant_lease`."""
        cache = self._active(request)
        blocks = self.geometry.num_blocks(cache.history)
        pages = tuple(tuple(page for page in group[:blocks] if page != NONE) for group in cache.pages)
        for group, group_pages in enumerate(pages):
            self._storage.claim(group, group_pages)
        lease_id = self._leases.add(HeldPages(request.request_id, cache.priority, pages))
        locations = cache.locate(0, blocks)
        return PageLease(lease_id, self.epoch, request.request_id, cache.history, locations)

    @_in_complete
    def end_lease(self, lease_id: LeaseId) -> None:
        """See `KVCacheManager.end_lease`."""
        held = self._leases.remove(lease_id)
        for group, pages in enumerate(held.pages):
            self._storage.release(group, pages[::-1], held.priority)

    @_in_complete
    def quarantine(self, request: CacheRequest) -> None:
        """See `KVCacheManager.quarantine`."""
        cache = self._reservation(request.request_id)
        first, last = cache.filling_blocks
        held = tuple(tuple(page for page in group[first:last] if page != NONE) for group in cache.pages)
        # Quarantined before the locks go: releasing an unlocked private page would free its slot.
        for pages in held:
            self._storage.pages.set_state(pages, PageState.QUARANTINED)
        self._quarantine.add(HeldPages(request.request_id, cache.priority, held))
        self._caches.close(cache)

    @_in_complete
    def release_quarantine(self, request_id: RequestId) -> None:
        """See `KVCacheManager.release_quarantine`. Raises LogicError when nothing is quarantined."""
        for group, pages in enumerate(self._quarantine.remove(request_id).pages):
            if pages:
                self._storage.free(self._storage.pool_group_of[group], pages[::-1])

    @_in_complete
    def free_resources(self, request: CacheRequest) -> None:
        """See `KVCacheManager.free_resources`."""
        cache = self._caches.by_request.get(request.request_id)
        if cache is not None:
            self._caches.close(cache)

    # -- reads -------------------------------------------------------------------------------------

    def availability(self) -> Availability:
        """See `KVCacheManager.availability`."""
        pages = {pool.pool_group_id: self._storage.available(pool.pool_group_id) for pool in self.geometry.pool_groups}
        return Availability(pages, len(self._caches.index_slots.free), 0)

    def has_cache(self, request_id: RequestId) -> bool:
        """Whether a cache exists, active or suspended."""
        return request_id in self._caches.by_request

    def is_suspended(self, request_id: RequestId) -> bool:
        """Whether the cache exists and is suspended."""
        cache = self._caches.by_request.get(request_id)
        return cache is not None and cache.status is CacheStatus.SUSPENDED

    def history_length(self, request_id: RequestId) -> int:
        """Positions already computed."""
        return self._caches.get(request_id).history

    def capacity(self, request_id: RequestId) -> int:
        """Positions that have a place."""
        return self._caches.get(request_id).capacity

    def num_committed_tokens(self, request_id: RequestId) -> int:
        """Positions whose blocks are immutable and reusable."""
        return self._caches.get(request_id).num_committed * self.geometry.tokens_per_block

    def index_slot(self, request_id: RequestId) -> IndexSlot:
        """The row of an active cache. Raises LogicError for a suspended one."""
        cache = self._caches.get(request_id)
        if cache.index_slot == NONE:
            msg = f"{request_id} is suspended and has no index slot"
            raise LogicError(msg)
        return IndexSlot(cache.index_slot)

    def block_table(self, request_id: RequestId, layer_group: LayerGroupId) -> npt.NDArray[np.int32]:
        """See `KVCacheManager.block_table`; read-only."""
        return self._caches.get(request_id).block_table(layer_group)

    def pages_to_fill(self, request_id: RequestId) -> Sequence[PageLocation]:
        """See `KVCacheManager.pages_to_fill`."""
        cache = self._reservation(request_id)
        return cache.locate(*cache.filling_blocks)

    def stats(self) -> ManagerStats:
        """See `KVCacheManager.stats`."""
        return ManagerStats(
            tiers={Tier[level.name]: self._page_counts(place) for place, level in enumerate(self.geometry.tiers)},
            index_slots_total=self._caches.index_slots.num_slots,
            index_slots_free=len(self._caches.index_slots.free),
            prefix_queried_tokens=self._desk.counts.queried_tokens,
            prefix_hit_tokens=self._desk.counts.hit_tokens,
            suspensions=self._desk.counts.suspensions,
            rollbacks=self._desk.rollbacks,
        )

    def audit(self) -> None:
        """See `KVCacheManager.audit`."""
        audit(self._parts())

    def snapshot(self) -> ManagerSnapshot:
        """See `KVCacheManager.snapshot`."""
        return take_snapshot(self._parts())

    # -- inside ------------------------------------------------------------------------------------

    def _parts(self) -> ManagerParts:
        return ManagerParts(
            self.geometry,
            self._storage,
            self._caches.by_request,
            self._caches.index_slots,
            self._leases,
            self._quarantine,
            self._desk.counts,
        )

    def _active(self, request: CacheRequest) -> KVCache:
        cache = self._caches.get(request.request_id)
        if cache.status is not CacheStatus.ACTIVE:
            msg = f"{request.request_id} is {cache.status}"
            raise LogicError(msg)
        return cache

    def _reservation(self, request_id: RequestId) -> KVCache:
        cache = self._caches.get(request_id)
        if not cache.is_reservation:
            msg = f"{request_id} is no reservation"
            raise LogicError(msg)
        return cache

    def _open_cache(self, request: CacheRequest, max_blocks: int, queried: int) -> tuple[KVCache, list[int]]:
        cache, costs = self._caches.open(request, max_blocks)
        before = Before(cache.num_blocks, is_new=True, queried_tokens=queried, hit_tokens=cache.history)
        self.require(TransactionKind.PLAN).note_grant(request.request_id, before)
        return cache, costs

    def _grow(self, cache: KVCache, num_tokens: int) -> Grant | Refusal:
        total = self.geometry.num_blocks(num_tokens)
        missing = total - cache.num_blocks
        if missing <= 0:
            return self._grant(cache)
        short = self._caches.shortage(missing, total)
        if short is not None:
            reason = RefusalReason.NEVER_FITS if short.is_final else RefusalReason.OUT_OF_PAGES
            return Refusal(cache.request_id, reason, short.needed, short.available, PoolGroupId(short.pool_group))
        self.require(TransactionKind.PLAN).note_grant(cache.request_id, Before(cache.num_blocks))
        costs = self._caches.grow(cache, missing)
        return self._grant(cache, costs, tokens=missing * self.geometry.tokens_per_block)

    def _revert(self, request_id: RequestId) -> None:
        transaction = self.require(TransactionKind.PLAN)
        before = transaction.forget_grant(request_id)
        if before is not None:
            self._caches.revert(self._caches.get(request_id), before)
            self._desk.rollbacks += 1
        elif request_id in transaction.stopped:
            msg = f"{request_id} was suspended or paused in this plan; its pages may have been granted on"
            raise LogicError(msg)

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
        return Grant(
            cache.request_id,
            tuple(PageCost(PoolGroupId(pool), TierLevel.DEVICE, cost) for pool, cost in enumerate(costs) if cost),
            tokens=tokens,
            reused_tokens=reused_tokens,
            index_slots=index_slots,
            history_length=cache.history,
            capacity=cache.capacity,
        )

    def _page_counts(self, place: int) -> PageCounts:
        total, free, cached = self._storage.counts(place)
        if place:
            return PageCounts(total, free, cached, total - free - cached)
        quarantined = self._quarantine.num_pages
        return PageCounts(
            total=total,
            free=free,
            cached=cached,
            in_use=total - free - cached - quarantined,
            leased=self._leases.num_pages,
            reserved=self._caches.num_reserved_pages,
            quarantined=quarantined,
        )
