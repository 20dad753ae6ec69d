"""`find_prefix`: the longest cached prefix that a new cache can claim now.

Only reads: a match is claimed by `KVCache`. A block counts when every layer group has its page, the page is not about
to be dropped, and, where it lies in a lower tier, there is a place for it on the device.
"""

from collections.abc import Sequence

from manager.page import NONE, PageState
from manager.radix_tree import BlockDigests
from manager.storage_manager import StorageManager

_COMMITTED = int(PageState.COMMITTED)
_HASHED_AHEAD = 64
"""Blocks hashed at a time: an uncached long prompt is not hashed to its end."""


def find_prefix(storage: StorageManager, digests: BlockDigests, token_ids: Sequence[int], max_blocks: int) -> list[int]:
    """Tree nodes of the leading blocks, at most `max_blocks`; `digests` is extended as far as needed."""
    nodes: list[int] = []
    while len(nodes) < max_blocks:
        first = len(nodes)
        last = min(max_blocks, first + _HASHED_AHEAD)
        digests.extend(token_ids, last)
        found = storage.tree.find(digests, first, last)
        nodes += found[: _num_usable(storage, found)]
        if len(nodes) < last:
            break
    return _promotable(storage, nodes)


def _num_usable(storage: StorageManager, nodes: Sequence[int]) -> int:
    """How many leading nodes have a page in every layer group that is not about to be dropped."""
    usable = len(nodes)
    state, has_leaving = storage.pages.state, not storage.moves.evictions.is_empty
    for column in storage.tree.pages:
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
            left[storage.pool_group_of[group]] -= storage.claim_cost(column[node])
        if min(left) < 0:
            return nodes[:place]
    return nodes
