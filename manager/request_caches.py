"""`RequestCaches`: the cache sets of all requests of one worker, with their index slots and adapters.

Opens, grows, reverts and closes caches as whole requests. Knows no transaction kinds and no refusals'
wording; capacity questions are answered before anything changes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from configs import KVCacheConfig
from manager.adapters import AdapterPool
from manager.cache_request import CacheRequest
from manager.cache_set import CacheSet, padded
from manager.digests import BlockDigests, DigestMemo
from manager.errors import LogicError
from manager.forking import Shared, find_shared
from manager.geometry import CacheGeometry
from manager.ids import RequestId, ReuseScope
from manager.kv_cache import KVCache
from manager.page import NONE
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


class RequestCaches:
    """Cache sets by request.

    Attributes:
        adapters: adapters of active caches.
        by_request: every cache that exists.
        index_slots: rows of the per-sequence tables.
    """

    __slots__ = (
        "_digests",
        "_geometry",
        "_journal",
        "_partial_reuse",
        "_reuse",
        "_storage",
        "adapters",
        "by_request",
        "index_slots",
    )

    def __init__(
        self,
        geometry: CacheGeometry,
        storage: StorageManager,
        adapters: AdapterPool,
        journal: Journal,
        config: KVCacheConfig,
    ) -> None:
        """No caches yet."""
        self.adapters = adapters
        self._geometry = geometry
        self._storage = storage
        self._journal = journal
        self._reuse = config.enable_block_reuse
        self._partial_reuse = config.enable_partial_reuse
        self._digests = DigestMemo(geometry.tokens_per_block)
        self.by_request: dict[RequestId, CacheSet] = {}
        self.index_slots = SlotAllocator(config.max_sequences, journal)

    def get(self, request_id: RequestId) -> CacheSet:
        """The request's cache.

        Raises:
            LogicError: it has none.
        """
        cache = self.by_request.get(request_id)
        if cache is None:
            msg = f"{request_id} has no cache"
            raise LogicError(msg)
        return cache

    def active(self, request: CacheRequest) -> CacheSet:
        """The request's cache.

        Raises:
            LogicError: it has none, or it is suspended.
        """
        cache = self.get(request.request_id)
        if cache.is_suspended:
            msg = f"{request.request_id} is suspended"
            raise LogicError(msg)
        return cache

    def reservation(self, request_id: RequestId) -> CacheSet:
        """The request's cache.

        Raises:
            LogicError: it has none, or does not wait for a transfer.
        """
        cache = self.get(request_id)
        if not cache.is_reservation:
            msg = f"{request_id} is no reservation"
            raise LogicError(msg)
        return cache

    def open(self, request: CacheRequest, limit: int, *, partial: bool) -> tuple[CacheSet, list[int]]:
        """Make a set: an index slot, the adapter, and the longest cached prefix of the first `limit` tokens.

        `partial` allows it to end within a block, which is copied then. Encoder output is claimed whole, or not.

        Returns:
            The set, and per pool group the pages that this takes from what is available.

        Raises:
            LogicError: an encoder input that this geometry has no place for.
        """
        caches = self._new_set(request, limit)
        primary, cross = caches.primary, caches.cross
        partial = partial and self._partial_reuse
        costs = primary.claim_prefix(request.token_ids, limit if self._reuse else 0, partial=partial and self._reuse)
        if cross is not None and self._reuse:
            costs = [a + b for a, b in zip(costs, cross.claim_whole(caches.encoder_token_ids), strict=True)]
        return caches, costs

    def find_shared(self, source: CacheSet, num_tokens: int) -> Shared | None:
        """What a fork of an active set would share; None where it cannot be, see `forking.find_shared`."""
        if source.cross is not None:
            return None
        return find_shared(self._storage, self._geometry, source.primary, num_tokens, reuse=self._reuse)

    def open_fork(self, request: CacheRequest, source: CacheSet, shared: Shared) -> tuple[CacheSet, list[int]]:
        """Make a set that begins with what `find_shared` found; returns as `open`."""
        caches = self._new_set(request, len(request.token_ids))
        # The source has hashed these blocks already.
        caches.primary.digests.known = source.primary.digests
        return caches, caches.primary.claim_shared(shared)

    def _new_set(self, request: CacheRequest, limit: int) -> CacheSet:
        """An empty set with its seat: an index slot, and the adapter."""
        digests = self._digests.of(request, limit)
        primary = KVCache(
            request.request_id, digests, self._geometry.chain, self._geometry, self._storage, self._journal
        )
        primary.priority = request.priority
        index_slot = self.index_slots.take(1)[0]
        encoder, cross = self._new_cross(request)
        caches = CacheSet(primary, cross, encoder, request.adapter_id, self._journal)
        caches.index_slot = index_slot
        self.by_request[request.request_id] = caches
        self._journal.push((self._remove, (request.request_id,)))
        if caches.adapter_id is not None:
            self.adapters.pin(caches.adapter_id)
        return caches

    def _new_cross(self, request: CacheRequest) -> tuple[Sequence[int], KVCache | None]:
        given = request.encoder_token_ids
        if not given:
            return (), None
        layout = self._geometry.cross
        if layout is None or len(given) > self._geometry.max_encoder_tokens:
            msg = (
                f"{request.request_id}: {len(given)} encoder tokens, there is room for "
                f"{self._geometry.max_encoder_tokens}"
            )
            raise LogicError(msg)
        encoder = padded(given, self._geometry.tokens_per_block)
        # The encoder sees its input in both directions: a block's content depends on all of it, and on the adapter.
        scope = ReuseScope(f"encoder {hash(tuple(encoder))} {request.adapter_id or ''} {request.reuse_scope}")
        digests = BlockDigests(scope, self._geometry.tokens_per_block)
        cross = KVCache(request.request_id, digests, layout, self._geometry, self._storage, self._journal)
        cross.priority = request.priority
        return encoder, cross

    def has_room(self, costs: Sequence[int]) -> bool:
        """Whether so many device pages per pool group are available."""
        available = self._storage.available
        for pool, count in enumerate(costs):  # noqa: SIM110 - a generator costs more than the loop
            if count > available(pool):
                return False
        return True

    def shortage(self, caches: CacheSet, num_blocks: int, num_cross_blocks: int) -> Shortage | None:
        """Whether bringing the set to the device and so many blocks more would not fit, and where."""
        needed = self._needed(caches, num_blocks, num_cross_blocks)
        for pool, count in enumerate(needed):
            available = self._storage.available(pool)
            if count > available:
                return Shortage(pool, count, available)
        return None

    def never_fits(self, caches: CacheSet, num_blocks: int, num_cross_blocks: int) -> Shortage | None:
        """Whether the layers that keep every block would need more than the whole device for so many more."""
        total, total_cross = caches.primary.num_blocks + num_blocks, caches.num_cross_blocks + num_cross_blocks
        layout, cross = self._geometry.chain, self._geometry.cross
        for pool, groups in enumerate(layout.full_groups_per_pool):
            needed = total * groups + (0 if cross is None else total_cross * cross.full_groups_per_pool[pool])
            slots = self._storage.slots[pool].num_slots
            if needed > slots:
                return Shortage(pool, needed, slots)
        return None

    def _needed(self, caches: CacheSet, num_blocks: int, num_cross_blocks: int) -> list[int]:
        growth = caches.growth_per_pool(num_blocks, num_cross_blocks)
        return [a + b for a, b in zip(growth, caches.pages_below(), strict=True)] if caches.is_suspended else growth

    def over_watermark(
        self, caches: CacheSet, num_blocks: int, num_cross_blocks: int, watermark: float
    ) -> Shortage | None:
        """Whether resuming would leave more of the device in use than `watermark`; never while nothing runs."""
        if not caches.is_suspended or all(other.is_suspended for other in self.by_request.values()):
            return None
        for pool, needed in enumerate(self._needed(caches, num_blocks, num_cross_blocks)):
            slots = self._storage.slots[pool].num_slots
            allowed = int(slots * watermark) - (slots - self._storage.available(pool))
            if needed > allowed:
                return Shortage(pool, needed, max(0, allowed))
        return None

    def having(self, pages: Sequence[int]) -> list[CacheSet]:
        """Sets with at least one of these pages; slow."""
        wanted = set(pages)
        return [
            caches
            for caches in self.by_request.values()
            if any(wanted & set(column) for member in caches.members for column in member.pages)
        ]

    def no_room_below(self, caches: CacheSet) -> Shortage | None:
        """Whether the lower tiers cannot take what a suspension moves, and where."""
        needed = [0] * self._storage.num_pool_groups
        for member in caches.members:
            for group, pages in member.by_group():
                kept = [page for page in pages[: member.num_history_blocks] if page != NONE]
                needed[self._storage.pool_group_of[group]] += self._storage.num_to_move(kept)
        for pool, pages_needed in enumerate(needed):
            room = self._storage.moves.lower_room(pool)
            if pages_needed > room or not self._storage.has_lower_tiers:
                return Shortage(pool, pages_needed, room)
        return None

    def suspend(self, caches: CacheSet) -> list[int]:
        """Suspend a set that `no_room_below` had nothing against; returns the pages moved down."""
        moved = caches.suspend()
        self._leave_seat(caches)
        return moved

    def resume(self, caches: CacheSet) -> list[int]:
        """Resume a set that `shortage` had nothing against; returns device slots taken per pool group."""
        caches.set_index_slot(self.index_slots.take(1)[0])
        self.adapters.pin(caches.adapter_id)
        return caches.resume()

    def close(self, caches: CacheSet) -> None:
        """Release everything; committed blocks stay cached."""
        caches.release()
        self._forget(caches, as_if_never=False)
        self._digests.keep(caches.request_id)

    def revert(self, caches: CacheSet, before: Before) -> None:
        """Take the set back to what it was before this plan."""
        renamed = caches.ungrow(before.num_blocks, before.num_cross_blocks)
        if before.is_new:
            renamed += caches.unclaim()
            self._forget(caches, as_if_never=True)
        elif before.is_resumed:
            renamed += caches.unresume()
            self._leave_seat(caches, as_if_never=True)
        for page in renamed:
            for other in self.by_request.values():
                other.rename(page)

    def _forget(self, caches: CacheSet, *, as_if_never: bool) -> None:
        del self.by_request[caches.request_id]
        self._journal.push((self.by_request.__setitem__, (caches.request_id, caches)))
        if caches.index_slot != NONE:
            self.index_slots.give((caches.index_slot,))
            if caches.adapter_id is not None:
                self.adapters.unpin(caches.adapter_id, as_if_never=as_if_never)

    def _leave_seat(self, caches: CacheSet, *, as_if_never: bool = False) -> None:
        self.index_slots.give((caches.index_slot,))
        caches.set_index_slot(NONE)
        self.adapters.unpin(caches.adapter_id, as_if_never=as_if_never)

    def _remove(self, request_id: RequestId) -> None:
        del self.by_request[request_id]
