"""`find_prefix`: the longest cached prefix that a new cache can claim now.

Only reads: a match is claimed by `KVCache`. A block counts when every layer group has its page, the page is not about
to be dropped, and, where it lies in a lower tier, there is a place for it on the device.
"""

from array import array
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from manager.digests import BlockDigests
from manager.geometry import CacheGeometry, ChainLayout, LayerGroup
from manager.page import NONE, PageState
from manager.storage_manager import StorageManager

_COMMITTED = int(PageState.COMMITTED)
_MAX_CHILDREN = 16
_HASHED_AHEAD = 64
"""Blocks hashed at a time: an uncached long prompt is not hashed to its end."""


@dataclass(slots=True)
class PrefixMatch:
    """Leading blocks that are cached.

    Attributes:
        nodes: their tree nodes.
        pages: per layer group, their pages; NONE where a windowed group has none.
    """

    nodes: list[int]
    pages: list[list[int]]

    def shorten(self, count: int) -> None:
        """Keep the first `count` blocks."""
        if count < len(self.nodes):
            del self.nodes[count:]
            for pages in self.pages:
                del pages[count:]


def find_prefix(
    storage: StorageManager,
    geometry: CacheGeometry,
    layout: ChainLayout,
    digests: BlockDigests,
    token_ids: Sequence[int],
    max_blocks: int,
) -> PrefixMatch:
    """The leading blocks, at most `max_blocks`, for the layer groups of a chain; extends `digests` as far as needed."""
    match = PrefixMatch([], [[] for _ in layout.groups])
    nodes, ahead = match.nodes, _HASHED_AHEAD
    columns = [storage.tree.pages[group] for group in layout.groups]
    groups = [geometry.layer_groups[group] for group in layout.groups]
    while len(nodes) < max_blocks:
        first = len(nodes)
        last = min(max_blocks, max(first + ahead, len(digests.chain)))
        ahead *= 2
        digests.extend(token_ids, last)
        found = storage.tree.find(digests, first, last)
        nodes += found
        for pages, column in zip(match.pages, columns, strict=True):
            pages += [column[node] for node in found]
        _drop_unusable(storage, groups, match, first)
        if len(nodes) < last:
            break
    _fit(storage, groups, geometry.tokens_per_block, match)
    return match


def _drop_unusable(storage: StorageManager, groups: Sequence[LayerGroup], match: PrefixMatch, first: int) -> None:
    """End the match at the first block, from `first` on, without a page in a group that keeps every block."""
    has_leaving, state = not storage.moves.evictions.is_empty, storage.pages.state
    for group, pages in zip(groups, match.pages, strict=True):
        if has_leaving:
            for place in range(first, len(pages)):
                if pages[place] != NONE and state[pages[place]] != _COMMITTED:
                    pages[place] = NONE
        if group.window is None and NONE in pages:
            match.shorten(pages.index(NONE))


def _fit(storage: StorageManager, groups: Sequence[LayerGroup], tokens_per_block: int, match: PrefixMatch) -> None:
    """Shorten the match to what the windows still show and the device has room for."""
    has_windows = any(group.window is not None for group in groups)
    if has_windows:
        match.shorten(_in_windows(groups, tokens_per_block, match))
    if storage.has_lower_tiers:
        match.shorten(_promotable(storage, groups, match))
        if has_windows:  # Shortened for want of room, it may have lost what a window had.
            match.shorten(_in_windows(groups, tokens_per_block, match))


def _in_windows(groups: Sequence[LayerGroup], tokens_per_block: int, match: PrefixMatch) -> int:
    """How many leading blocks there are of which every windowed group has what its window still shows."""
    pairs = [pair for pair in zip(groups, match.pages, strict=True) if pair[0].window is not None]
    missing = [[place for place, page in enumerate(pages) if page == NONE] for _, pages in pairs]
    for count in range(len(match.nodes), 0, -1):
        stale = [group.stale_blocks(count * tokens_per_block, tokens_per_block) for group, _ in pairs]
        # Nothing may be missing before the stale blocks (sinks) nor behind them (the window).
        if all(
            all(place >= count or place in gone for place in _extremes(places, count))
            for places, gone in zip(missing, stale, strict=True)
        ):
            return count
    return 0


def _extremes(places: Sequence[int], count: int) -> Sequence[int]:
    """Of sorted places, those that could refute a prefix of `count` blocks: the lowest, and the highest below it."""
    end = bisect_left(places, count)
    return (*places[:1], *places[max(0, end - 1) : end]) if end else ()


def _promotable(storage: StorageManager, groups: Sequence[LayerGroup], match: PrefixMatch) -> int:
    """How many leading blocks have pages in lower tiers that find places on the device, the others being pinned."""
    left = [storage.available(pool) for pool in range(storage.num_pool_groups)]
    for place in range(len(match.nodes)):
        for group, pages in zip(groups, match.pages, strict=True):
            # Counts windowed pages that are stale by the end, too: a little short of the longest, never beyond it.
            if pages[place] != NONE:
                left[group.pool_group_id] -= storage.claim_cost(pages[place])
        if min(left) < 0:
            return place
    return len(match.nodes)


def _is_usable(storage: StorageManager, page: int) -> bool:
    return page != NONE and storage.pages.state[page] == _COMMITTED


def find_partial(
    storage: StorageManager,
    layout: ChainLayout,
    digests: BlockDigests,
    nodes: Sequence[int],
    token_ids: Sequence[int],
    limit: int,
) -> tuple[list[int], int]:
    """A cached block that begins as the one after `nodes` does, as far as `token_ids[:limit]`.

    Until the copy is made its source stays, too, and the request must not come to wait for that: there is no copy
    where the rest of its blocks would not fit beside.

    Returns:
        Its page per layer group, and how many of its positions agree; no pages where none does, or where there is no
        room. Of many children only the newest are looked at.
    """
    size = digests.tokens_per_block
    first = len(nodes) * size
    wanted = array("i", token_ids[first : min(limit, first + size)]).tobytes()
    parent = nodes[-1] if nodes else storage.tree.by_digest.get(digests.root, NONE)
    best, longest = NONE, 0
    columns = [storage.tree.pages[group] for group in layout.groups]
    if parent != NONE and wanted:
        for child in storage.tree.alike(parent, wanted, _MAX_CHILDREN):
            agreed = _common_tokens(wanted, storage.tree.tokens(child))
            if agreed > longest and all(_is_usable(storage, column[child]) for column in columns):
                best, longest = child, agreed
    if best == NONE:
        return [], 0
    pages = [column[best] for column in columns]
    rest = -(-len(token_ids) // size) - len(nodes) - 1
    left = [storage.available(pool) for pool in range(storage.num_pool_groups)]
    for group, page in zip(layout.groups, pages, strict=True):
        left[storage.pool_group_of[group]] -= storage.clone_cost(page) + rest
    return (pages, longest) if min(left) >= 0 else ([], 0)


def _common_tokens(wanted: bytes, found: bytes) -> int:
    if found.startswith(wanted):
        return len(wanted) // 4
    return next(at for at, pair in enumerate(zip(wanted, found, strict=False)) if pair[0] != pair[1]) // 4
