"""`PageContents`: what every position of every page should hold, and what it really holds.

Each position of a page carries a value derived from the whole token prefix up to it and from the layer group, so
that a page used for another prefix, moved wrongly or handed on too early is seen at once.
"""

from collections.abc import Sequence
from functools import lru_cache
from hashlib import sha256

import numpy as np
import numpy.typing as npt

from manager import CacheGeometry, KVCacheManagerV2, LayerGroupId, PoolGroupId, RequestId, TierLevel
from manager.pools.numpy_pools import NumpyPool

GARBAGE = -7


@lru_cache(maxsize=1 << 16)
def value_of(prefix: tuple[int, ...], group: int) -> int:
    """The value of the last position of `prefix`."""
    digest = sha256(bytes([group]) + np.array(prefix, np.int32).tobytes()).digest()
    return int.from_bytes(digest[:7], "little")


class PageContents:
    """Pools of a geometry whose pages have 8 bytes per position, and the truth about them.

    Attributes:
        pools: to hand to the manager.
    """

    def __init__(self, geometry: CacheGeometry) -> None:
        """Zeroed pools for every tier."""
        self._geometry = geometry
        self.pools: dict[tuple[TierLevel, PoolGroupId], NumpyPool] = {
            (tier, pool.pool_group_id): NumpyPool(pool.num_slots[place], pool.page_bytes)
            for place, tier in enumerate(geometry.tiers)
            for pool in geometry.pool_groups
        }

    def by_store(self) -> list[NumpyPool]:
        """Pools in the order of stores: tier by tier."""
        return [
            self.pools[tier, pool.pool_group_id] for tier in self._geometry.tiers for pool in self._geometry.pool_groups
        ]

    def page(self, group: int, slot: int) -> npt.NDArray[np.int64]:
        """[tokens_per_block] int64 view of a device slot."""
        pool = self.pools[TierLevel.DEVICE, self._geometry.layer_groups[group].pool_group_id]
        size = pool.slot_bytes
        return pool.memory[slot * size : (slot + 1) * size].view(np.int64)[: self._geometry.tokens_per_block]

    def write(self, manager: KVCacheManagerV2, request_id: RequestId, tokens: Sequence[int], span: range) -> None:
        """What a step does: compute the positions of `span` into the pages of the request."""
        size = self._geometry.tokens_per_block
        for group in self._geometry.layer_groups:
            table = manager.block_table(request_id, group.layer_group_id)
            for position in span:
                slot = int(table[position // size])
                if slot >= 0:
                    prefix = tuple(tokens[: position + 1])
                    self.page(group.layer_group_id, slot)[position % size] = value_of(prefix, group.layer_group_id)

    def check(self, manager: KVCacheManagerV2, request_id: RequestId, tokens: Sequence[int]) -> None:
        """Every position that a query at `history_length` can see must hold its value."""
        size, history = self._geometry.tokens_per_block, manager.history_length(request_id)
        for group in self._geometry.layer_groups:
            table = manager.block_table(request_id, group.layer_group_id)
            stale = group.stale_blocks(history, size)
            for block in range(-(-history // size)):
                if block in stale:
                    continue
                assert table[block] >= 0, f"{request_id}: visible block {block} has no page"
                self.check_page(group.layer_group_id, int(table[block]), tokens[:history], block)

    def check_page(self, group: LayerGroupId, slot: int, tokens: Sequence[int], block: int) -> None:
        """One page holds block `block` of `tokens`, as far as they reach."""
        size = self._geometry.tokens_per_block
        last = min(len(tokens), (block + 1) * size)
        expected = [value_of(tuple(tokens[: position + 1]), group) for position in range(block * size, last)]
        found = self.page(group, slot)[: len(expected)].tolist()
        assert found == expected, f"layer group {group}, slot {slot}: not block {block} of {list(tokens)}"

    def spoil(self, group: int, slot: int) -> None:
        """A late read writes into a slot that nobody else may use."""
        self.page(group, slot)[:] = GARBAGE
