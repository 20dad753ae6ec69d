"""`audit` recomputes the manager's state from its smallest facts and compares (M6).

It only reads. It derives locks from caches and leases, free lists from pages, cached counts from
states, digests from tokens; the first difference is a CorruptedError that names the invariant.
"""

from collections import Counter
from collections.abc import Iterator

from manager.cache_chain import CacheStatus
from manager.cache_set import CacheSet
from manager.digests import block_digest
from manager.errors import CorruptedError
from manager.kv_cache import KVCache
from manager.page import NONE, PageState
from manager.snapshot import ManagerParts


def _require(condition: bool, message: str) -> None:  # noqa: FBT001 - reads as an assertion
    if not condition:
        raise CorruptedError(message)


def audit(parts: ManagerParts) -> None:
    """Check every invariant; also inside an open transaction.

    Raises:
        CorruptedError: names the first that does not hold.
    """
    _audit_slots(parts)
    _audit_locks(parts)
    _audit_holds(parts)
    _audit_states(parts)
    _audit_tree(parts)
    for request_id, caches in parts.caches.items():
        _require(caches.request_id == request_id, f"cache of {caches.request_id} is filed under {request_id}")
        _audit_set(caches)
        for member in caches.members:
            _audit_cache(parts, member)
    _audit_index_slots(parts)
    _audit_adapters(parts)


def _members(parts: ManagerParts) -> Iterator[KVCache]:
    return (member for caches in parts.caches.values() for member in caches.members)


def _audit_set(caches: CacheSet) -> None:
    """Members are in one state, and the encoder's output is whole or absent (M4, V8)."""
    name, cross = caches.request_id, caches.cross
    for member in caches.members:
        _require(member.status is caches.status, f"{name}: members are {[m.status for m in caches.members]}")
        _require(member.request_id == name, f"{name}: a member belongs to {member.request_id}")
    _require(0 <= caches.primary.draft_lag <= min(1, caches.primary.history), f"{name}: draft lag")
    if cross is not None:
        whole = len(caches.encoder_token_ids)
        _require(cross.history in (0, whole), f"{name}: {cross.history} of {whole} encoder positions are computed")
        _require(cross.capacity in (0, whole), f"{name}: {cross.capacity} of {whole} encoder positions have a place")


def _audit_adapters(parts: ManagerParts) -> None:
    """Pins are the active caches' adapters; every page is free or of one adapter."""
    adapters = parts.adapters
    active = Counter(
        caches.adapter_id for caches in parts.caches.values() if caches.adapter_id and not caches.is_suspended
    )
    _require(dict(active) == adapters.pins, f"adapter pins {adapters.pins}, active caches account for {dict(active)}")
    pinned = sum(adapters.size_of(adapter_id) for adapter_id in adapters.pins)
    _require(adapters.available == adapters.num_pages - pinned, f"adapter pages: {adapters.available} available")
    owned = [page for _, pages in adapters.owners() for page in pages]
    _require(sorted([*owned, *adapters.free]) == list(range(adapters.num_pages)), "adapter pages lost or shared")


def _audit_slots(parts: ManagerParts) -> None:
    """Every slot is free, or holds exactly one page."""
    pages = parts.storage.pages
    holders: list[list[int]] = [[] for _ in parts.storage.slots]
    for page in pages.live():
        if pages.state[page] != PageState.LEAVING:
            holders[pages.store[page]].append(pages.slot[page])
    for store, slot in (*parts.storage.moves.copies.freed, *parts.storage.moves.evictions.destinations.values()):
        holders[store].append(slot)
    for store, slots in enumerate(parts.storage.slots):
        found = sorted([*slots.free, *holders[store]])
        if found != list(range(slots.num_slots)):
            twice = [slot for slot, count in Counter(found).items() if count > 1]
            lost = sorted(set(range(slots.num_slots)) - set(found))
            msg = f"slots of store {store}: lost {lost[:8]}, in two places {twice[:8]}"
            raise CorruptedError(msg)


def _audit_locks(parts: ManagerParts) -> None:
    """Locks are what caches and leases account for, nothing else."""
    pages = parts.storage.pages
    expected: Counter[int] = Counter()
    for cache in _members(parts):
        for group_pages in cache.pages:
            expected.update(page for page in group_pages if page != NONE)
    for held in parts.leases.values():
        for held_pages in held.pages:
            expected.update(held_pages)
    expected.update(parts.storage.moves.pins)
    for page, locks in enumerate(pages.locks):
        _require(locks == expected[page], f"page {page} has {locks} locks, its users account for {expected[page]}")


def _audit_holds(parts: ManagerParts) -> None:
    """Holds are the locks of suspended caches; active caches have their pages on the device."""
    storage = parts.storage
    expected: Counter[int] = Counter()
    for cache in _members(parts):
        for group, group_pages in cache.by_group():
            present = [page for page in group_pages if page != NONE]
            if cache.is_suspended:
                expected.update(present)
                continue
            store = storage.pool_group_of[group]
            elsewhere = [page for page in present if storage.pages.store[page] != store]
            _require(not elsewhere, f"{cache.request_id} is active with pages {elsewhere} off the device")
    _require(
        storage.moves.holds == dict(expected),
        f"holds {storage.moves.holds}, suspended caches account for {dict(expected)}",
    )


def _audit_states(parts: ManagerParts) -> None:
    """States agree with locks, tree, quarantine and the counts of cached pages."""
    storage, pages = parts.storage, parts.storage.pages
    quarantined = [
        page for held in parts.quarantine.by_request().values() for group_pages in held.pages for page in group_pages
    ]
    cached: list[set[int]] = [set() for _ in storage.slots]
    seen_quarantined = set()
    for page in pages.live():
        state, locks, node = PageState(pages.state[page]), pages.locks[page], pages.node[page]
        if state in (PageState.COMMITTED, PageState.LEAVING):
            _require(
                node != NONE and storage.tree.pages[pages.group[page]][node] == page,
                f"{state.name} page {page} is not the page of its node {node}",
            )
        if state == PageState.COMMITTED and not locks:
            cached[pages.store[page]].add(page)
        _require(state != PageState.PRIVATE or locks > 0, f"private page {page} belongs to nobody")
        _require(state != PageState.LEAVING or not locks, f"leaving page {page} has {locks} locks")
        if state == PageState.QUARANTINED:
            seen_quarantined.add(page)
    _require(seen_quarantined == set(quarantined), "quarantined pages differ from the quarantine table")
    for store, eviction in enumerate(storage.eviction):
        order = list(eviction.order())
        _require(len(order) == len(set(order)), f"store {store}: a page is twice in the eviction order")
        _require(set(order) == cached[store], f"store {store}: eviction order and cached pages differ")
        _require(
            eviction.evictable == len(order), f"store {store}: counts {eviction.evictable} cached, has {len(order)}"
        )


def _audit_tree(parts: ManagerParts) -> None:
    """Links agree in both directions, digests follow from tokens, nothing empty is kept."""
    storage, tree = parts.storage, parts.storage.tree
    reached = 0
    for digest, node in tree.by_digest.items():
        _require(tree.digest(node) == digest, f"node {node} is filed under another digest")
        children = list(tree.children(node))
        reached += len(children)
        for child in children:
            _require(
                tree.parent[child] == node, f"node {child} is a child of {node} but has parent {tree.parent[child]}"
            )
            expected = block_digest(digest, tree.tokens(child))
            _require(tree.digest(child) == expected, f"digest of node {child} does not follow from its tokens")
        _require(bool(children) or tree.has_page(node), f"node {node} has neither page nor child")
        for group, column in enumerate(tree.pages):
            page = column[node]
            _require(
                page == NONE or (storage.pages.node[page] == node and storage.pages.group[page] == group),
                f"node {node} has page {page} of layer group {group}, which is not its",
            )
    roots = sum(tree.parent[node] == NONE for node in tree.by_digest.values())
    _require(reached + roots == len(tree.by_digest), "nodes that no root leads to")


def _audit_cache(parts: ManagerParts, cache: KVCache) -> None:
    """Lengths, pages, nodes and block tables of one cache."""
    name, size, pages = cache.request_id, parts.geometry.tokens_per_block, parts.storage.pages
    _require(
        cache.num_committed * size <= cache.history <= cache.capacity,
        f"{name}: committed {cache.num_committed} blocks, history {cache.history}, capacity {cache.capacity}",
    )
    _require(
        (cache.num_committed == 0) == (cache.leaf == NONE),
        f"{name}: {cache.num_committed} committed, leaf {cache.leaf}",
    )
    tree = parts.storage.tree
    _require(
        cache.leaf == NONE or tree.by_digest.get(tree.digest(cache.leaf), NONE) == cache.leaf,
        f"{name}: its leaf {cache.leaf} has left the tree",
    )
    for group, group_pages in cache.by_group():
        _require(
            len(group_pages) == cache.num_blocks,
            f"{name}: {len(group_pages)} pages in layer group {group} for {cache.num_blocks} blocks",
        )
        node = cache.leaf
        for block in range(cache.num_committed - 1, -1, -1):
            page = group_pages[block]
            _require(page == NONE or pages.node[page] == node, f"{name}: block {block} is not on its path in the tree")
            node = tree.parent[node]
        reached = max(cache.history, cache.reserved_tokens)
        stale = parts.geometry.layer_groups[group].stale_blocks(reached, size)
        for block, page in enumerate(group_pages):
            if page == NONE:
                _require(block in stale, f"{name}: block {block} of layer group {group} is visible but has no page")
                continue
            expected = PageState.COMMITTED if block < cache.num_committed else PageState.PRIVATE
            _require(
                pages.state[page] == expected, f"{name}: block {block} of layer group {group} is not {expected.name}"
            )
        if cache.is_suspended:
            continue
        slots = [NONE if page == NONE else pages.slot[page] for page in group_pages]
        _require(cache.block_table(group).tolist() == slots, f"{name}: block table of layer group {group} is stale")


def _audit_index_slots(parts: ManagerParts) -> None:
    """Active caches have one index slot each, suspended ones none."""
    taken = []
    for cache in parts.caches.values():
        _require(
            (cache.index_slot == NONE) == (cache.status == CacheStatus.SUSPENDED),
            f"{cache.request_id} is {cache.status} with index slot {cache.index_slot}",
        )
        if cache.index_slot != NONE:
            taken.append(cache.index_slot)
    found = sorted([*parts.index_slots.free, *taken])
    _require(found == list(range(parts.index_slots.num_slots)), f"index slots: taken {taken}, rest is not free")
