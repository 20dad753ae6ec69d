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
from manager.adapters import AdapterLoad, AdapterPool, AdapterSizes
from manager.audit import audit
from manager.cache_chain import CacheStatus
from manager.cache_request import CacheRequest
from manager.cache_set import CacheSet
from manager.errors import LogicError
from manager.events import EventLog, KVEvent
from manager.geometry import CacheGeometry
from manager.grants import Grant, Refusal
from manager.ids import AdapterId, Epoch, IndexSlot, LayerGroupId, LeaseId, RequestId
from manager.lease import HeldPages, LeaseTable, QuarantineTable
from manager.page import NONE, PageState
from manager.page_location import PageLease, PageLocation
from manager.planning import Planner
from manager.pools.base import CopyEngine
from manager.reports import count
from manager.request_caches import RequestCaches
from manager.snapshot import ManagerParts, ManagerSnapshot, take_snapshot
from manager.stats import Availability, ManagerStats
from manager.storage.copies import NoCopies
from manager.storage.journal import Journal
from manager.storage_manager import StorageManager
from manager.transaction import CacheTransaction, TransactionDesk, TransactionKind, inside

_PLAN, _COMPLETE = TransactionKind.PLAN, TransactionKind.COMPLETE
_in_plan = inside(TransactionKind.PLAN)
_in_complete = inside(TransactionKind.COMPLETE)


class KVCacheManagerV2:
    """Implements `manager.interface.KVCacheManager`; one thread only.

    Attributes:
        geometry: sizes.
        epoch: this life of the worker, carried by its leases.
        journal: undo log of the open transaction.
        desk: opens and publishes transactions.
    """

    def __init__(
        self,
        geometry: CacheGeometry,
        config: KVCacheConfig,
        epoch: Epoch = Epoch(1),  # noqa: B008 - a NewType of int
        engine: CopyEngine | None = None,
        adapters: AdapterSizes | None = None,
    ) -> None:
        """Every page is free. `engine` copies between the pools of all tiers; without it only the bookkeeping moves."""
        self.geometry = geometry
        self.epoch = epoch
        self.journal = Journal()
        self._config = config
        self._adapters = AdapterPool(adapters or AdapterSizes(), self.journal)
        self._storage = StorageManager(geometry, self.journal)
        self._caches = RequestCaches(geometry, self._storage, self._adapters, self.journal, config)
        self._by_request = self._caches.by_request
        self._leases = LeaseTable(self.journal)
        self._quarantine = QuarantineTable(self.journal)
        self._engine = engine or NoCopies()
        blocks = config.event_queue_blocks
        self._events = EventLog(geometry, self._storage, blocks) if blocks else None
        self.desk = TransactionDesk(self.journal, self._storage, self._adapters, self._engine, self._events)
        self._planner = Planner(
            geometry, self._storage, self._caches, self.desk, self.journal, watermark=config.resume_watermark
        )

    @property
    def max_request_tokens(self) -> int:
        """Longest request that can ever run here, prompt and output together."""
        return self.geometry.max_request_tokens

    # -- transactions ------------------------------------------------------------------------------

    def begin_plan(self) -> CacheTransaction:
        """Open a plan. Raises LogicError when a transaction is open."""
        return self.desk.begin(TransactionKind.PLAN)

    def begin_complete(self) -> CacheTransaction:
        """Open a complete. Raises LogicError when a transaction is open."""
        return self.desk.begin(TransactionKind.COMPLETE)

    def finish_fills(self) -> tuple[RequestId, ...]:
        """Wait for the copies that the last plan started; call it before its step.

        Returns:
            Requests one of whose pages did not arrive: their caches are gone, the rest of their committed
            blocks stays cached, and they start again with `prepare_context`.
        """
        failed = self._engine.wait()
        if not failed:
            return ()
        complete = self.begin_complete()
        lost = [self._storage.lose(copy.target_store, copy.target_slot) for copy in failed]
        pages = [page for page in lost if page is not None]
        victims = self._caches.having(pages)
        for caches in victims:
            self._caches.close(caches)
        self._storage.release(pages, 0)
        complete.commit()
        return tuple(caches.request_id for caches in victims)

    def close(self) -> None:
        """Stop copying; may be called twice."""
        self._engine.close()

    # -- plan --------------------------------------------------------------------------------------

    @_in_plan
    def prepare_context(self, request: CacheRequest) -> Grant | Refusal:
        """See `KVCacheManager.prepare_context`."""
        return self._planner.prepare(request)

    @_in_plan
    def fork(self, source: CacheRequest, request: CacheRequest) -> Grant | Refusal:
        """See `KVCacheManager.fork`."""
        return self._planner.fork(source, request)

    @_in_plan
    def resize_context(self, request: CacheRequest, num_tokens: int) -> Grant | Refusal:
        """See `KVCacheManager.resize_context`."""
        caches = self._caches.active(request)
        return self._planner.grow(caches, caches.primary.history + num_tokens)

    def try_allocate_generation(self, request: CacheRequest) -> Grant | Refusal:
        """See `KVCacheManager.try_allocate_generation`."""
        caches = self._by_request.get(request.request_id)
        if caches is not None and caches.cross is None and self.desk.kind is _PLAN:
            cache = caches.primary
            num_tokens = len(request.token_ids)
            if request.num_draft_tokens:
                num_tokens += self._planner.num_draft_positions(request)
            if num_tokens <= cache.room:
                # Every decode, at all but one step in a block: nothing changes, so nothing needs a guard.
                return Grant(cache.request_id, (), 0, 0, 0, 0, cache.history, cache.room)
        return self._allocate_generation(request)

    @_in_plan
    def _allocate_generation(self, request: CacheRequest) -> Grant | Refusal:
        num_tokens = len(request.token_ids) + self._planner.num_draft_positions(request)
        return self._planner.grow(self._caches.get(request.request_id), num_tokens)

    @_in_plan
    def suspend_request(self, request: CacheRequest) -> Grant | Refusal:
        """See `KVCacheManager.suspend_request`."""
        return self._planner.suspend(request)

    @_in_plan
    def pause_for_recompute(self, request: CacheRequest) -> Grant:
        """See `KVCacheManager.pause_for_recompute`."""
        return self._planner.pause(request)

    @_in_plan
    def prepare_disagg_gen_init(self, request: CacheRequest) -> Grant | Refusal:
        """See `KVCacheManager.prepare_disagg_gen_init`."""
        return self._planner.reserve(request)

    @_in_plan
    def revert_allocate_context(self, request: CacheRequest) -> None:
        """See `KVCacheManager.revert_allocate_context`."""
        self._planner.revert(request.request_id)

    @_in_plan
    def revert_allocate_generation(self, request: CacheRequest) -> None:
        """See `KVCacheManager.revert_allocate_generation`."""
        self._planner.revert(request.request_id)

    # -- complete ----------------------------------------------------------------------------------

    def advance(self, request: CacheRequest, num_tokens: int, draft_lag: int = 0) -> None:
        """See `KVCacheManager.advance`. Raises LogicError beyond capacity or the known tokens."""
        caches = self._by_request.get(request.request_id)
        if caches is not None and caches.cross is None and self.desk.kind is _COMPLETE:
            cache = caches.primary
            before = cache.history
            history = before + num_tokens
            is_known = before <= history <= cache.room and history <= len(request.token_ids)
            if is_known and history < cache.quiet_until and draft_lag == cache.draft_lag and not cache.reserved_tokens:
                # Every decode, at all but one step in a block: one number changes, so nothing needs a guard.
                self.journal.push((cache.put_history, (before,)))
                cache.history = history
                return
        self._advance(request, num_tokens, draft_lag)

    @_in_complete
    def _advance(self, request: CacheRequest, num_tokens: int, draft_lag: int) -> None:
        caches = self._by_request.get(request.request_id)
        if caches is None or caches.primary.status is not CacheStatus.ACTIVE:
            caches = self._caches.active(request)  # says why not
        cache, reuse = caches.primary, self._config.enable_block_reuse
        history = cache.history + num_tokens
        if num_tokens < 0 or cache.reserved_tokens or not 0 <= draft_lag <= min(1, history):
            msg = (
                f"{request.request_id}: cannot advance by {num_tokens} with draft_lag={draft_lag}, "
                f"reservation={cache.reserved_tokens > 0}"
            )
            raise LogicError(msg)
        if caches.cross is not None and num_tokens:
            self._complete_encoder(caches)
        cache.advance(request.token_ids, history, reuse=reuse, draft_lag=draft_lag)

    def _complete_encoder(self, caches: CacheSet) -> None:
        if caches.missing_cross_blocks:
            msg = f"{caches.request_id} was computed before its encoder output had a place"
            raise LogicError(msg)
        caches.complete_encoder(reuse=self._config.enable_block_reuse)

    @_in_complete
    def rewind(self, request: CacheRequest, num_tokens: int) -> None:
        """See `KVCacheManager.rewind`. Raises LogicError for committed positions."""
        self._caches.active(request).primary.rewind(num_tokens)

    @_in_complete
    def activate_disagg_gen(self, request: CacheRequest) -> None:
        """See `KVCacheManager.activate_disagg_gen`."""
        caches = self._caches.reservation(request.request_id)
        caches.activate(request.token_ids, reuse=self._config.enable_block_reuse)

    @_in_complete
    def grant_lease(self, request: CacheRequest, num_tokens: int | None = None) -> PageLease:
        """See `KVCacheManager.grant_lease`."""
        caches = self._caches.active(request)
        leased = caches.primary.history if num_tokens is None else num_tokens
        if not 0 <= leased <= caches.primary.history or (num_tokens or 0) % self.geometry.tokens_per_block:
            msg = f"{request.request_id}: cannot lease {leased} of {caches.primary.history} tokens"
            raise LogicError(msg)
        if caches.primary.draft_lag or caches.needs_encoder:
            msg = (
                f"{request.request_id}: draft_lag={caches.primary.draft_lag}, needs_encoder={caches.needs_encoder}: "
                "a lease is of what is computed in every layer"
            )
            raise LogicError(msg)
        held: list[tuple[int, ...]] = []
        locations: list[PageLocation] = []
        for member in caches.members:
            blocks = self.geometry.num_blocks(leased if member is caches.primary else member.history)
            for group, column in member.by_group():
                pages = tuple(page for page in column[:blocks] if page != NONE)
                self._storage.claim(group, pages)
                held.append(pages)
            locations += member.locate(0, blocks)
        lease_id = self._leases.add(HeldPages(request.request_id, caches.primary.priority, tuple(held)))
        return PageLease(lease_id, self.epoch, request.request_id, leased, tuple(locations))

    @_in_complete
    def end_lease(self, lease_id: LeaseId) -> None:
        """See `KVCacheManager.end_lease`."""
        held = self._leases.remove(lease_id)
        for pages in held.pages:
            self._storage.release(pages[::-1], held.priority)

    @_in_complete
    def quarantine(self, request: CacheRequest) -> None:
        """See `KVCacheManager.quarantine`."""
        caches = self._caches.reservation(request.request_id)
        held = tuple(
            tuple(page for page in column[slice(*member.filling_blocks)] if page != NONE)
            for member in caches.members
            for column in member.pages
        )
        # Quarantined before the locks go: releasing an unlocked private page would free its slot.
        for pages in held:
            self._storage.pages.set_state(pages, PageState.QUARANTINED)
        self._quarantine.add(HeldPages(request.request_id, caches.primary.priority, held))
        self._caches.close(caches)

    @_in_complete
    def release_quarantine(self, request_id: RequestId) -> None:
        """See `KVCacheManager.release_quarantine`. Raises LogicError when nothing is quarantined."""
        for pages in self._quarantine.remove(request_id).pages:
            if pages:
                self._storage.free(pages[::-1])

    @_in_complete
    def free_resources(self, request: CacheRequest) -> None:
        """See `KVCacheManager.free_resources`."""
        caches = self._caches.by_request.get(request.request_id)
        if caches is not None:
            self._caches.close(caches)

    # -- reads -------------------------------------------------------------------------------------

    def availability(self) -> Availability:
        """See `KVCacheManager.availability`."""
        pages = {pool.pool_group_id: self._storage.available(pool.pool_group_id) for pool in self.geometry.pool_groups}
        return Availability(pages, len(self._caches.index_slots.free), self._adapters.available)

    def has_cache(self, request_id: RequestId) -> bool:
        """Whether a cache exists, active or suspended."""
        return request_id in self._caches.by_request

    def is_suspended(self, request_id: RequestId) -> bool:
        """Whether the cache exists and is suspended."""
        caches = self._caches.by_request.get(request_id)
        return caches is not None and caches.is_suspended

    def history_length(self, request_id: RequestId) -> int:
        """Positions already computed."""
        return self._caches.get(request_id).primary.history

    def draft_lag(self, request_id: RequestId) -> int:
        """See `KVCacheManager.draft_lag`."""
        return self._caches.get(request_id).primary.draft_lag

    def needs_encoder(self, request_id: RequestId) -> bool:
        """See `KVCacheManager.needs_encoder`."""
        return self._caches.get(request_id).needs_encoder

    def capacity(self, request_id: RequestId) -> int:
        """Positions that have a place."""
        return self._caches.get(request_id).primary.capacity

    def num_committed_tokens(self, request_id: RequestId) -> int:
        """Positions whose blocks are immutable and reusable."""
        return self._caches.get(request_id).primary.num_committed * self.geometry.tokens_per_block

    def index_slot(self, request_id: RequestId) -> IndexSlot:
        """The row of an active cache. Raises LogicError for a suspended one."""
        caches = self._caches.get(request_id)
        if caches.index_slot == NONE:
            msg = f"{request_id} is suspended and has no index slot"
            raise LogicError(msg)
        return IndexSlot(caches.index_slot)

    def block_table(self, request_id: RequestId, layer_group: LayerGroupId) -> npt.NDArray[np.int32]:
        """See `KVCacheManager.block_table`; read-only."""
        member = self._caches.get(request_id).member_of(layer_group)
        return np.empty(0, np.int32) if member is None else member.block_table(layer_group)

    def pages_to_fill(self, request_id: RequestId) -> Sequence[PageLocation]:
        """See `KVCacheManager.pages_to_fill`."""
        members = self._caches.reservation(request_id).members
        return tuple(page for member in members for page in member.locate(*member.filling_blocks))

    def adapter_pages(self, adapter_id: AdapterId) -> tuple[int, ...]:
        """See `KVCacheManager.adapter_pages`."""
        return self._adapters.pages_of(adapter_id)

    def take_adapter_loads(self) -> tuple[AdapterLoad, ...]:
        """See `KVCacheManager.take_adapter_loads`."""
        return self._adapters.take_loads()

    def take_kv_events(self) -> tuple[KVEvent, ...]:
        """See `KVCacheManager.take_kv_events`."""
        return self._event_log().take()

    def known_prefixes(self) -> tuple[KVEvent, ...]:
        """See `KVCacheManager.known_prefixes`."""
        return self._event_log().listing()

    def stats(self) -> ManagerStats:
        """See `KVCacheManager.stats`."""
        return count(self._parts(), rollbacks=self.desk.rollbacks)

    def audit(self) -> None:
        """See `KVCacheManager.audit`."""
        audit(self._parts())

    def snapshot(self) -> ManagerSnapshot:
        """See `KVCacheManager.snapshot`."""
        return take_snapshot(self._parts())

    # -- inside ------------------------------------------------------------------------------------

    def _event_log(self) -> EventLog:
        if self._events is None:
            msg = "KV events are off: event_queue_blocks=0"
            raise LogicError(msg)
        return self._events

    def _parts(self) -> ManagerParts:
        return ManagerParts(
            self.geometry,
            self._storage,
            self._caches.by_request,
            self._caches.index_slots,
            self._adapters,
            self._leases,
            self._quarantine,
            self.desk.counts,
        )
