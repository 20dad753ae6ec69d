"""Which blocks KV events should have told of, from a snapshot of the tree instead of from changes."""

from collections.abc import Iterable, Sequence

from manager import BlockHash, CacheGeometry, ReuseScope, TierLevel, block_hashes
from manager.digests import BlockDigests
from manager.snapshot import NodeView


def known_blocks(
    tree: Sequence[NodeView], geometry: CacheGeometry, prefixes: Iterable[tuple[str, tuple[int, ...]]]
) -> dict[BlockHash, TierLevel]:
    """Tier of each block with a page in every layer group that keeps all; `prefixes` are all ever committed."""
    size = geometry.tokens_per_block
    hash_of: dict[int, BlockHash] = {}
    for scope, tokens in prefixes:
        digests = BlockDigests(ReuseScope(scope), size)
        digests.extend(tokens, len(tokens) // size)
        if digests.chain:
            hash_of[digests.chain[-1]] = block_hashes(tokens, size, ReuseScope(scope))[-1]
    full = [group.layer_group_id for group in geometry.layer_groups if group.window is None]
    needed = full or [group.layer_group_id for group in geometry.layer_groups]
    known: dict[BlockHash, TierLevel] = {}
    for node in tree:
        pages = [node.pages[group] for group in needed]
        present = [page for page in pages if page is not None]
        if node.depth and len(present) == len(needed):
            known[hash_of[node.digest]] = geometry.tiers[
                max(page.store for page in present) // len(geometry.pool_groups)
            ]
    return known
