"""`Planner`: what the calls of a plan decide, for one request at a time.

Answers capacity questions before anything changes, and turns what was taken into grants. The facade guards
the calls; the scheduler never sees this.
"""

from collections import Counter
from collections.abc import Sequence

from manager.cache_chain import CacheStatus
from manager.cache_request import CacheRequest
from manager.cache_set import CacheSet
from manager.errors import LogicError
from manager.forking import Shared
from manager.geometry import CacheGeometry
from manager.grants import Grant, PageCost, Refusal, RefusalReason
from manager.ids import AdapterId, PoolGroupId, RequestId
from manager.request_caches import RequestCaches, Shortage
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
        caches = self._caches.by_request.get(request.request_id)
        if caches is not None:
            return self.grow(caches, 0) if caches.is_suspended else self._grant(caches)
        refusal = self._no_seat(request.request_id, request.adapter_id)
        if refusal is not None:
            return refusal
        caches, costs, adapter_pages = self._open(request, len(request.token_ids) - 1, partial=True)
        reused = caches.primary.history
        return self._grant(caches, costs, reused_tokens=reused, index_slots=1, adapter_pages=adapter_pages)

    def fork(self, source: CacheRequest, request: CacheRequest) -> Grant | Refusal:
        """A cache that begins as the source's does. Raises LogicError when one exists."""
        request_id = request.request_id
        if request_id in self._caches.by_request:
            msg = f"{request_id} has a cache already"
            raise LogicError(msg)
        refusal = self._no_seat(request_id, request.adapter_id)
        if refusal is not None:
            return refusal
        origin = self._caches.by_request.get(source.request_id)
        shared = None if origin is None else self._find_shared(origin, source, request)
        if origin is None or shared is None:
            return Refusal(request_id, RefusalReason.CANNOT_FORK)
        if shared.tail:
            for pool, needed in enumerate(self._geometry.chain.groups_per_pool):
                available = self._storage.available(pool)
                if needed > available:
                    return Refusal(request_id, RefusalReason.OUT_OF_PAGES, needed, available, PoolGroupId(pool))
        adapter_pages = self._caches.adapters.cost(request.adapter_id)
        caches, costs = self._caches.open_fork(request, origin, shared)
        # Nothing was looked up in the cache, so nothing is counted as found there.
        self._plan.note_grant(request_id, Before(caches.primary.num_claimed, is_new=True))
        reused = caches.primary.history
        return self._grant(caches, costs, reused_tokens=reused, index_slots=1, adapter_pages=adapter_pages)

    def _find_shared(self, origin: CacheSet, source: CacheRequest, request: CacheRequest) -> Shared | None:
        if origin.is_suspended or origin.is_reservation or request.encoder_token_ids:
            return None
        if (source.reuse_scope, source.adapter_id) != (request.reuse_scope, request.adapter_id):
            return None
        # As in every claim, the last known token is computed: its logits are needed.
        num_tokens = min(request.prompt_length, len(request.token_ids) - 1, origin.primary.history)
        if num_tokens < 1 or source.token_ids[:num_tokens] != request.token_ids[:num_tokens]:
            return None
        return self._caches.find_shared(origin, num_tokens)

    def suspend(self, request: CacheRequest) -> Grant | Refusal:
        """ACTIVE -> SUSPENDED, or LOWER_TIERS_FULL. Raises LogicError for a reservation."""
        caches = self._caches.active(request)
        if caches.is_reservation:
            msg = f"{request.request_id} is a reservation: its pages are being filled"
            raise LogicError(msg)
        short = self._caches.no_room_below(caches)
        if short is not None:
            return self._refuse(caches, RefusalReason.LOWER_TIERS_FULL, short)
        self._plan.note_stop(request.request_id)
        stores = Counter(self._storage.pages.store[page] for page in self._caches.suspend(caches))
        costs = tuple(self._page_cost(store, count) for store, count in sorted(stores.items()))
        primary = caches.primary
        return Grant(request.request_id, costs, history_length=primary.history, capacity=primary.capacity)

    def pause(self, request: CacheRequest) -> Grant:
        """Close the cache. Raises LogicError for a reservation."""
        caches = self._caches.get(request.request_id)
        if caches.is_reservation:
            msg = f"{request.request_id} is a reservation: quarantine or free it"
            raise LogicError(msg)
        self._plan.note_stop(request.request_id)
        self._caches.close(caches)
        return Grant(request.request_id)

    def reserve(self, request: CacheRequest) -> Grant | Refusal:
        """All that activation needs, or nothing. Raises LogicError when a cache exists."""
        if request.request_id in self._caches.by_request:
            msg = f"{request.request_id} has a cache already"
            raise LogicError(msg)
        mark = len(self._journal)
        refusal = self._no_seat(request.request_id, request.adapter_id)
        if refusal is not None:
            return refusal
        # Whole blocks only: a transfer moves whole pages.
        caches, costs, adapter_pages = self._open(request, request.prompt_length, partial=False)
        caches.reserve(request.prompt_length)
        grown = self.grow(caches, request.prompt_length + 1 + self.num_draft_positions(request))
        if isinstance(grown, Refusal):
            self._journal.undo_to(mark)
            return grown
        for cost in grown.pages:
            costs[cost.pool_group] += cost.pages
        reused = caches.primary.history
        return self._grant(
            caches, costs, tokens=grown.tokens, reused_tokens=reused, index_slots=1, adapter_pages=adapter_pages
        )

    def num_draft_positions(self, request: CacheRequest) -> int:
        """Positions behind the known tokens that the next step may write: drafts, and the drafter's padding (V19)."""
        drafts = request.num_draft_tokens
        return drafts + self._geometry.draft_padding_tokens if drafts else 0

    def _open(self, request: CacheRequest, limit: int, *, partial: bool) -> tuple[CacheSet, list[int], int]:
        adapter_pages = self._caches.adapters.cost(request.adapter_id)
        caches, costs = self._caches.open(request, limit, partial=partial)
        primary, queried = caches.primary, len(request.token_ids)
        before = Before(
            primary.num_claimed,
            caches.num_cross_blocks,
            is_new=True,
            queried_tokens=queried,
            hit_tokens=primary.history,
        )
        self._plan.note_grant(request.request_id, before)
        return caches, costs, adapter_pages

    def grow(self, caches: CacheSet, num_tokens: int) -> Grant | Refusal:
        """Resume where suspended, grow to `num_tokens`, and give the encoder's output its place; all or nothing.

        `num_tokens` = 0 only resumes.
        """
        primary, size = caches.primary, self._geometry.tokens_per_block
        cross = 0 if caches.cross is None or not num_tokens else caches.missing_cross_blocks
        if num_tokens <= primary.num_blocks * size and not cross and primary.status is CacheStatus.ACTIVE:
            # Every decode, at all but one step in `size`.
            return Grant(caches.request_id, (), 0, 0, 0, 0, primary.history, primary.num_blocks * size)
        missing = max(0, -(-num_tokens // size) - primary.num_blocks)
        if primary.status is CacheStatus.ACTIVE:
            costs = caches.growth_per_pool(missing, cross)
            if self._caches.has_room(costs):
                self._plan.note_grant(caches.request_id, Before(primary.num_blocks, caches.num_cross_blocks))
                caches.grow(missing, cross)
                return self._grant(caches, costs, tokens=missing * size)
        return self._refuse_or_resume(caches, missing, cross)

    def _refuse_or_resume(self, caches: CacheSet, missing: int, cross: int) -> Grant | Refusal:
        if caches.is_suspended:
            refusal = self._no_seat(caches.request_id, caches.adapter_id)
            if refusal is not None:
                return refusal
        short = self._caches.never_fits(caches, missing, cross)
        if short is not None:
            return self._refuse(caches, RefusalReason.NEVER_FITS, short)
        short = self._caches.shortage(caches, missing, cross)
        if short is not None:
            return self._refuse(caches, RefusalReason.OUT_OF_PAGES, short)
        short = self._caches.over_watermark(caches, missing, cross, self._watermark)
        if short is not None:
            return self._refuse(caches, RefusalReason.OVER_RESUME_WATERMARK, short)
        return self._resume_and_grow(caches, missing, cross)

    def _resume_and_grow(self, caches: CacheSet, missing: int, cross: int) -> Grant:
        primary = caches.primary
        before = Before(primary.num_blocks, caches.num_cross_blocks, is_resumed=True)
        self._plan.note_grant(caches.request_id, before)
        adapter_pages = self._caches.adapters.cost(caches.adapter_id)
        costs = self._caches.resume(caches)
        growth = caches.growth_per_pool(missing, cross)
        caches.grow(missing, cross)
        costs = [old + new for old, new in zip(costs, growth, strict=True)]
        tokens = missing * self._geometry.tokens_per_block
        reused = primary.history
        return self._grant(
            caches, costs, tokens=tokens, reused_tokens=reused, index_slots=1, adapter_pages=adapter_pages
        )

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

    def _refuse(self, caches: CacheSet, reason: RefusalReason, short: Shortage) -> Refusal:
        return Refusal(caches.request_id, reason, short.needed, short.available, PoolGroupId(short.pool_group))

    def _page_cost(self, store: int, count: int) -> PageCost:
        tier, pool = divmod(store, len(self._geometry.pool_groups))
        return PageCost(PoolGroupId(pool), self._geometry.tiers[tier], count)

    def _no_seat(self, request_id: RequestId, adapter_id: AdapterId | None) -> Refusal | None:
        """Whether there is no index slot, or no room for the adapter."""
        if not self._caches.index_slots.free:
            return Refusal(request_id, RefusalReason.OUT_OF_INDEX_SLOTS, needed=1, available=0)
        adapters = self._caches.adapters
        needed = adapters.cost(adapter_id)
        if needed > adapters.available:
            return Refusal(request_id, RefusalReason.OUT_OF_ADAPTER_PAGES, needed, adapters.available)
        return None

    def _grant(
        self,
        caches: CacheSet,
        costs: Sequence[int] = (),
        *,
        tokens: int = 0,
        reused_tokens: int = 0,
        index_slots: int = 0,
        adapter_pages: int = 0,
    ) -> Grant:
        device = self._geometry.tiers[0]
        pages = tuple([PageCost(PoolGroupId(pool), device, cost) for pool, cost in enumerate(costs) if cost])
        primary = caches.primary
        return Grant(
            caches.request_id,
            pages,
            tokens,
            reused_tokens,
            index_slots,
            adapter_pages,
            primary.history,
            primary.capacity,
        )
