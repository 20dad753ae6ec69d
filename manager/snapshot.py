"""`ManagerSnapshot`: everything that a rollback must restore, as a comparable value; for tests and state dumps."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from manager.adapters import AdapterPool
from manager.cache_chain import CacheStatus
from manager.cache_set import CacheSet
from manager.geometry import CacheGeometry
from manager.ids import AdapterId, LeaseId, RequestId
from manager.kv_cache import KVCache
from manager.lease import LeaseTable, QuarantineTable
from manager.page import NONE, PageState
from manager.pools.base import SlotCopy
from manager.storage.copies import PendingFill
from manager.storage.slots import SlotAllocator
from manager.storage_manager import StorageManager
from manager.transaction import PublishedCounts


@dataclass(frozen=True, slots=True)
class ManagerParts:
    """What a manager is made of."""

    geometry: CacheGeometry
    storage: StorageManager
    caches: Mapping[RequestId, CacheSet]
    index_slots: SlotAllocator
    adapters: AdapterPool
    leases: LeaseTable
    quarantine: QuarantineTable
    counts: PublishedCounts


@dataclass(frozen=True, slots=True)
class PageView:
    """One page as a value; `slot` is NONE in a snapshot without slot names."""

    store: int
    slot: int
    state: PageState
    locks: int
    holds: int


@dataclass(frozen=True, slots=True)
class NodeView:
    """One tree node, in depth-first order; children newest first."""

    depth: int
    digest: int
    pages: tuple[PageView | None, ...]


@dataclass(frozen=True, slots=True)
class ChainView:
    """One member of a set as a value."""

    status: CacheStatus
    priority: int
    lengths: tuple[int, int, int, int, int]
    """history, blocks with a place, committed blocks, claimed blocks, draft lag."""
    reserved_tokens: int
    pages: tuple[tuple[PageView | None, ...], ...]


@dataclass(frozen=True, slots=True)
class CacheView:
    """One set of caches as a value."""

    request_id: RequestId
    index_slot: int
    adapter_id: AdapterId | None
    members: tuple[ChainView, ...]


@dataclass(frozen=True, slots=True)
class ManagerSnapshot:
    """Everything that a rollback restores, order included.

    Attributes:
        free: per store, free slots in order; without slot names their number.
        cached: per store and priority, (digest, layer group, page) of cached pages, next victim first.
    """

    free: tuple[tuple[int, ...], ...]
    cached: tuple[tuple[tuple[int, tuple[tuple[int, int, PageView], ...]], ...], ...]
    tree: tuple[NodeView, ...]
    caches: tuple[CacheView, ...]
    free_index_slots: tuple[int, ...]
    adapters: tuple[tuple[tuple[AdapterId, int], ...], tuple[tuple[AdapterId, tuple[int, ...]], ...], tuple[int, ...]]
    """Pins; resident adapters with their pages, next to be evicted first; free pages."""
    leases: tuple[tuple[LeaseId, RequestId, tuple[tuple[PageView, ...], ...]], ...]
    quarantined: tuple[tuple[RequestId, tuple[tuple[PageView, ...], ...]], ...]
    counts: tuple[int, int, int]
    pending: tuple[tuple[SlotCopy | tuple[PageView, PendingFill | PageView] | tuple[int, int], ...], ...]
    """Copies out, fills, slots to be freed, and destinations of victims, of the open transaction."""

    def without_slot_names(self) -> "ManagerSnapshot":
        """The same with every slot and index slot unnamed: equal for two runs that took other slots."""
        return replace(
            self,
            free=tuple((len(slots),) for slots in self.free),
            cached=tuple(
                tuple((lane, tuple((d, g, _unnamed(page)) for d, g, page in entries)) for lane, entries in store)
                for store in self.cached
            ),
            tree=tuple(
                replace(node, pages=tuple(None if page is None else _unnamed(page) for page in node.pages))
                for node in self.tree
            ),
            caches=tuple(_unnamed_cache(cache) for cache in self.caches),
            free_index_slots=(len(self.free_index_slots),),
            adapters=(
                self.adapters[0],
                tuple((adapter_id, (len(pages),)) for adapter_id, pages in self.adapters[1]),
                (len(self.adapters[2]),),
            ),
            leases=tuple(
                (lease_id, request_id, tuple(tuple(map(_unnamed, group)) for group in pages))
                for lease_id, request_id, pages in self.leases
            ),
            quarantined=tuple(
                (request_id, tuple(tuple(map(_unnamed, group)) for group in pages))
                for request_id, pages in self.quarantined
            ),
        )


def _unnamed(page: PageView) -> PageView:
    return replace(page, slot=NONE)


def _unnamed_cache(cache: CacheView) -> CacheView:
    members = tuple(
        replace(
            member,
            pages=tuple(tuple(None if page is None else _unnamed(page) for page in group) for group in member.pages),
        )
        for member in cache.members
    )
    return replace(cache, index_slot=min(cache.index_slot, 0), members=members)


def take_snapshot(parts: ManagerParts) -> ManagerSnapshot:
    """Write the present state down; slow, for tests and state dumps."""
    storage = parts.storage
    return ManagerSnapshot(
        free=tuple(tuple(slots.free) for slots in storage.slots),
        cached=tuple(_cached(storage, store) for store in range(len(storage.slots))),
        tree=tuple(_tree(storage)),
        caches=tuple(_cache(storage, caches) for _, caches in sorted(parts.caches.items())),
        free_index_slots=tuple(parts.index_slots.free),
        adapters=(
            tuple(sorted(parts.adapters.pins.items())),
            tuple(parts.adapters.owners()),
            tuple(parts.adapters.free),
        ),
        leases=tuple(
            (lease_id, held.request_id, tuple(_views(storage, pages) for pages in held.pages))
            for lease_id, held in parts.leases.items()
        ),
        quarantined=tuple(
            (request_id, tuple(_views(storage, pages) for pages in held.pages))
            for request_id, held in sorted(parts.quarantine.by_request().items())
        ),
        pending=(
            tuple(storage.moves.copies.stages),
            tuple((_view(storage, page), fill) for page, fill in sorted(storage.moves.copies.fills.items())),
            tuple(
                (_view(storage, page), _view(storage, source)) for page, source in storage.moves.copies.clones.items()
            ),
            tuple(storage.moves.copies.freed),
            tuple(sorted(storage.moves.evictions.destinations.values())),
        ),
        counts=(parts.counts.queried_tokens, parts.counts.hit_tokens, parts.counts.suspensions),
    )


def _view(storage: StorageManager, page: int) -> PageView:
    pages, holds = storage.pages, storage.moves.holds.get(page, 0)
    return PageView(pages.store[page], pages.slot[page], PageState(pages.state[page]), pages.locks[page], holds)


def _views(storage: StorageManager, pages: tuple[int, ...]) -> tuple[PageView, ...]:
    return tuple(_view(storage, page) for page in pages)


def _cached(storage: StorageManager, store: int) -> tuple[tuple[int, tuple[tuple[int, int, PageView], ...]], ...]:
    pages, tree = storage.pages, storage.tree
    return tuple(
        (priority, tuple((tree.digest(pages.node[page]), pages.group[page], _view(storage, page)) for page in order))
        for priority, order in storage.eviction[store].priorities()
        if order
    )


def _tree(storage: StorageManager) -> list[NodeView]:
    tree = storage.tree
    roots = sorted((digest, node) for digest, node in tree.by_digest.items() if tree.parent[node] == NONE)
    stack = [(0, node) for _, node in reversed(roots)]
    views = []
    while stack:
        depth, node = stack.pop()
        held = [column[node] for column in tree.pages]
        pages = tuple(None if page == NONE else _view(storage, page) for page in held)
        views.append(NodeView(depth, tree.digest(node), pages))
        stack.extend((depth + 1, child) for child in reversed(list(tree.children(node))))
    return views


def _cache(storage: StorageManager, caches: CacheSet) -> CacheView:
    members = tuple(_chain(storage, member) for member in caches.members)
    return CacheView(caches.request_id, caches.index_slot, caches.adapter_id, members)


def _chain(storage: StorageManager, cache: KVCache) -> ChainView:
    return ChainView(
        status=cache.status,
        priority=cache.priority,
        lengths=(cache.history, cache.num_blocks, cache.num_committed, cache.num_claimed, cache.draft_lag),
        reserved_tokens=cache.reserved_tokens,
        pages=tuple(
            tuple(None if page == NONE else _view(storage, page) for page in group_pages) for group_pages in cache.pages
        ),
    )
