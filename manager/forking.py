"""What a fork shares with its source: found without changing anything, so that a refusal costs nothing.

    source   |---- committed, full ----|--- full ---|-- part --|-- the source's own ... -->
    fork     |========= locked once more ===========|-- copy --|   (the position after `num_tokens` is its own)

Full blocks are never written again, so both keep them. In the next block both go on to write, each its own tokens, so
the fork starts with a copy of it.
"""

from dataclasses import dataclass

from manager.cache_chain import CacheChain
from manager.geometry import CacheGeometry
from manager.page import NONE
from manager.storage_manager import StorageManager


@dataclass(frozen=True, slots=True)
class Shared:
    """The beginning of a source, as its fork will have it.

    Attributes:
        num_blocks: full blocks.
        num_committed: of them, those in the tree.
        leaf: tree node of the last of those, or NONE.
        pages: per layer group, page record per full block; NONE where the fork will not see it.
        tail: per layer group, the page to copy; empty where the fork starts with a whole block.
        num_tail_tokens: positions of it that are the fork's.
        draft_lag: of those, how many the draft layers have not computed.
    """

    num_blocks: int
    num_committed: int
    leaf: int
    pages: tuple[tuple[int, ...], ...]
    tail: tuple[int, ...]
    num_tail_tokens: int
    draft_lag: int


def find_shared(
    storage: StorageManager,
    geometry: CacheGeometry,
    source: CacheChain,
    num_tokens: int,
    *,
    reuse: bool,
) -> Shared | None:
    """What a fork after the first `num_tokens` positions of an active source would share.

    `reuse`: full blocks are committed.

    Returns:
        None where pages that the fork would see have left the source's window, where a full block is not
        committed yet that both would commit, or where the block to copy is itself a copy of this plan.
    """
    size = geometry.tokens_per_block
    num_blocks, num_tail_tokens = divmod(num_tokens, size)
    num_committed = min(num_blocks, source.num_committed)
    if reuse and num_committed < num_blocks:
        return None
    pages, tail = [], []
    for group, column in source.by_group():
        stale = geometry.layer_groups[group].stale_blocks(num_tokens, size)
        kept = [NONE if block in stale else page for block, page in enumerate(column[:num_blocks])]
        if any(page == NONE and block not in stale for block, page in enumerate(kept)):
            return None
        pages.append(tuple(kept))
        if num_tail_tokens:
            tail.append(column[num_blocks])
    if NONE in tail or any(page in storage.moves.copies.clones for page in tail):
        return None
    if num_committed and all(column[num_committed - 1] == NONE for column in pages):
        return None  # its leaf could leave the tree
    leaf = source.leaf
    for _ in range(source.num_committed - num_committed):
        leaf = storage.tree.parent[leaf]
    draft_lag = max(0, num_tokens - (source.history - source.draft_lag))
    return Shared(
        num_blocks,
        num_committed,
        leaf if num_committed else NONE,
        tuple(pages),
        tuple(tail),
        num_tail_tokens,
        draft_lag,
    )
