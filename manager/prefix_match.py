"""`find_prefix`: the longest cached prefix that a new cache can claim now.

Only reads: a match is claimed by `KVCache`. A block counts when every layer group has its page, the page is not about
to be dropped, and, where it lies in a lower tier, there is a place for it on the device.
"""

from array import array
from bisect import bisect_left
from collections.abc import Sequence
from itertools import islice

from manager.geometry import CacheGeometry, LayerGroup
from manager.page import NONE, PageState
from manager.radix_tree import BlockDigests
from manager.storage_manager import StorageManager

_COMMITTED = int(PageState.COMMITTED)
_MAX_CHILDREN = 64
_HASHED_AHEAD = 64
"""Blocks hashed at a time: an uncached long prompt is not hashed to its end."""


def find_prefix(
    storage: StorageManager, geometry: CacheGeometry, digests: BlockDigests, token_ids: Sequence[int], max_blocks: int
) -> list[int]:
    """Tree nodes of the leading blocks, at most `max_blocks`; `digests` is extended as far as needed."""
    nodes: list[int] = []
    windowed = [group for group in geometry.layer_groups if group.window is not None]
    columns = [storage.tree.pages[group.layer_group_id] for group in geometry.layer_groups if group.window is None]
    while len(nodes) < max_blocks:
        first = len(nodes)
        last = min(max_blocks, first + _HASHED_AHEAD)
        digests.extend(token_ids, last)
        found = storage.tree.find(digests, first, last)
        nodes += found[: _num_usable(storage, columns, found)]
        if len(nodes) < last:
            break
    if not windowed:
        return _promotable(storage, nodes)
    size = geometry.tokens_per_block
    # Shortened for want of room, the prefix may have lost what a window had: look again.
    return _in_windows(storage, windowed, size, _promotable(storage, _in_windows(storage, windowed, size, nodes)))


def _in_windows(
    storage: StorageManager, groups: Sequence[LayerGroup], tokens_per_block: int, nodes: list[int]
) -> list[int]:
    """The longest leading part of `nodes` of which every windowed group has what its window still shows."""
    missing = []
    for group in groups:
        column = storage.tree.pages[group.layer_group_id]
        missing.append([place for place, node in enumerate(nodes) if not _is_usable(storage, column[node])])
    for count in range(len(nodes), 0, -1):
        stale = [group.stale_blocks(count * tokens_per_block, tokens_per_block) for group in groups]
        # Nothing may be missing before the stale blocks (sinks) nor behind them (the window).
        if all(
            all(place >= count or place in gone for place in _extremes(places, count))
            for places, gone in zip(missing, stale, strict=True)
        ):
            return nodes[:count]
    return []


def _extremes(places: Sequence[int], count: int) -> Sequence[int]:
    """Of sorted places, those that could refute a prefix of `count` blocks: the lowest, and the highest below it."""
    end = bisect_left(places, count)
    return (*places[:1], *places[max(0, end - 1) : end]) if end else ()


def _is_usable(storage: StorageManager, page: int) -> bool:
    return page != NONE and storage.pages.state[page] == _COMMITTED


def _num_usable(storage: StorageManager, columns: Sequence[Sequence[int]], nodes: Sequence[int]) -> int:
    """How many leading nodes have a page in every column that is not about to be dropped."""
    usable = len(nodes)
    state, has_leaving = storage.pages.state, not storage.moves.evictions.is_empty
    for column in columns:
        for place, node in enumerate(nodes[:usable]):
            page = column[node]
            if page == NONE or (has_leaving and state[page] != _COMMITTED):
                usable = place
                break
    return usable


def _promotable(storage: StorageManager, nodes: list[int]) -> list[int]:
    """Leading nodes whose pages in lower tiers find places on the device, the others of them being pinned."""
    if not storage.has_lower_tiers:
        return nodes
    left = [storage.available(pool) for pool in range(storage.num_pool_groups)]
    for place, node in enumerate(nodes):
        for group, column in enumerate(storage.tree.pages):
            # Counts windowed pages that are stale by the end, too: a little short of the longest, never beyond it.
            if column[node] != NONE:
                left[storage.pool_group_of[group]] -= storage.claim_cost(column[node])
        if min(left) < 0:
            return nodes[:place]
    return nodes


def find_partial(
    storage: StorageManager, digests: BlockDigests, nodes: Sequence[int], token_ids: Sequence[int], limit: int
) -> tuple[list[int], int]:
    """A cached block that begins as the one after `nodes` does, as far as `token_ids[:limit]`.

    Returns:
        Its page per layer group, and how many of its positions agree; no pages where none does, or where there is no
        room for the copy. Of many children only the newest are looked at.
    """
    size = digests.tokens_per_block
    first = len(nodes) * size
    wanted = array("i", token_ids[first : min(limit, first + size)]).tobytes()
    parent = nodes[-1] if nodes else storage.tree.by_digest.get(digests.root, NONE)
    best, longest = NONE, 0
    if parent != NONE and wanted:
        for child in islice(storage.tree.children(parent), _MAX_CHILDREN):
            agreed = _common_tokens(wanted, storage.tree.tokens(child))
            if agreed > longest and all(_is_usable(storage, column[child]) for column in storage.tree.pages):
                best, longest = child, agreed
    if best == NONE:
        return [], 0
    pages = [column[best] for column in storage.tree.pages]
    left = [storage.available(pool) for pool in range(storage.num_pool_groups)]
    for group, page in enumerate(pages):
        left[storage.pool_group_of[group]] -= storage.clone_cost(page)
    return (pages, longest) if min(left) >= 0 else ([], 0)


def _common_tokens(wanted: bytes, found: bytearray) -> int:
    if found.startswith(wanted):
        return len(wanted) // 4
    return next(at for at, pair in enumerate(zip(wanted, found, strict=False)) if pair[0] != pair[1]) // 4
