"""KV events: what a router elsewhere must hear to know which prefixes this worker has cached, and where.

A block is *known* at a tier when every layer group that keeps all of a request has its page in that tier or a faster
one (of a model with windows only: every layer group; what the windows still show, the claim decides). Encoder output
is not told.

Events are derived at publish, by comparing the tree nodes that the journal names with what was told of them before:
a plan that is rolled back or a step that is abandoned has nothing to tell, and no call of a transaction does any work
for it. Replaying all events gives what `EventLog.listing` lists.
"""

from array import array
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from manager.block_hashes import next_hash, scope_hash
from manager.geometry import CacheGeometry
from manager.ids import BlockHash, ReuseScope, TierLevel
from manager.page import NONE
from manager.storage_manager import StorageManager

_UNKNOWN = 255


class KVEventKind(StrEnum):
    """What happened to blocks."""

    STORED = "stored"
    """They can be matched from now on."""
    UPDATED = "updated"
    """They moved to another tier."""
    REMOVED = "removed"
    """They cannot be matched any more."""
    CLEARED = "cleared"
    """Too much happened since the last drain: forget all of this worker, and read `known_prefixes`."""


@dataclass(frozen=True, slots=True)
class KVEvent:
    """Blocks of one reuse scope to which one thing happened.

    Attributes:
        kind: what happened.
        tier: where the blocks are now; of removed ones, where they were.
        scope: their reuse scope (`effective_scope`); also part of their hashes.
        block_hashes: `block_hashes` of the prefixes that end with these blocks; parents first where several are stored.
    """

    kind: KVEventKind
    tier: TierLevel = TierLevel.DEVICE
    scope: ReuseScope = ReuseScope("")  # noqa: RUF009 - a NewType of str
    block_hashes: tuple[BlockHash, ...] = ()


@dataclass(frozen=True, slots=True)
class BlockChanges:
    """What one transaction did to known blocks.

    Attributes:
        nodes: hash, root and tier of each node that changed; of a removed one the tier is unknown.
        events: the same as events, removed blocks first.
    """

    nodes: Mapping[int, tuple[BlockHash, int, int]]
    events: Sequence[KVEvent]


class EventLog:
    """What was told of every tree node, and events not taken yet.

    Attributes:
        overflows: how often the queue was full and everything in it was dropped.
    """

    __slots__ = (
        "_hash",
        "_is_full",
        "_levels",
        "_max_blocks",
        "_num_queued",
        "_queue",
        "_required",
        "_root",
        "_storage",
        "_tier",
        "overflows",
    )

    def __init__(self, geometry: CacheGeometry, storage: StorageManager, max_blocks: int) -> None:
        """Nothing is known; the queue holds at most `max_blocks` block hashes."""
        self._storage = storage
        self._levels = geometry.tiers
        chain = geometry.chain.groups
        self._required = [group for group in chain if geometry.layer_groups[group].window is None] or list(chain)
        self._max_blocks = max_blocks
        self._queue: deque[KVEvent] = deque()
        self._num_queued = 0
        self._is_full = False
        self.overflows = 0
        # Per tree node; hash and root mean something only where the tier is known.
        self._tier = bytearray()
        self._hash = array("Q")
        self._root = array("i")

    def collect(self) -> BlockChanges:
        """What the open transaction, published but still undoable, did to known blocks. Changes nothing."""
        storage = self._storage
        self._extend(len(storage.tree.parent))
        found: dict[int, tuple[BlockHash, int]] = {}
        changes: dict[int, tuple[BlockHash, int, int]] = {}
        for node in storage.changed_nodes():
            tier, before = self._tier_of(node), self._tier[node]
            if tier == before:
                continue
            if before == _UNKNOWN:
                block_hash, root = self._name(node, found)
            else:
                block_hash, root = BlockHash(self._hash[node]), self._root[node]
            changes[node] = (block_hash, root, tier)
        return BlockChanges(changes, self._as_events(changes))

    def apply(self, changes: BlockChanges) -> None:
        """The transaction stays: remember what it did, and queue its events. Nothing in here can fail."""
        for node, (block_hash, root, tier) in changes.nodes.items():
            self._tier[node], self._hash[node], self._root[node] = tier, block_hash, root
        for event in changes.events:
            self._push(event)

    def _as_events(self, changes: Mapping[int, tuple[BlockHash, int, int]]) -> list[KVEvent]:
        grouped: dict[tuple[int, int, int], list[BlockHash]] = {}
        order = (KVEventKind.REMOVED, KVEventKind.UPDATED, KVEventKind.STORED)
        for node, (block_hash, root, tier) in changes.items():
            before = self._tier[node]
            if tier == _UNKNOWN:
                key = (order.index(KVEventKind.REMOVED), before, root)
            else:
                kind = KVEventKind.STORED if before == _UNKNOWN else KVEventKind.UPDATED
                key = (order.index(kind), tier, root)
            grouped.setdefault(key, []).append(block_hash)
        scopes = self._storage.tree.scopes
        return [
            KVEvent(order[rank], self._levels[tier], scopes[root], tuple(hashes))
            for (rank, tier, root), hashes in sorted(grouped.items())
        ]

    def take(self) -> tuple[KVEvent, ...]:
        """Events since the last call, oldest first; only CLEARED when there were too many."""
        events = (KVEvent(KVEventKind.CLEARED),) if self._is_full else tuple(self._queue)
        self._queue.clear()
        self._num_queued, self._is_full = 0, False
        return events

    def listing(self) -> tuple[KVEvent, ...]:
        """Every known block as STORED events, one per tier and scope; slow with many blocks."""
        grouped: dict[tuple[int, int], list[BlockHash]] = {}
        for node, tier in enumerate(self._tier):
            if tier != _UNKNOWN:
                grouped.setdefault((tier, self._root[node]), []).append(BlockHash(self._hash[node]))
        scopes = self._storage.tree.scopes
        return tuple(
            KVEvent(KVEventKind.STORED, self._levels[tier], scopes[root], tuple(hashes))
            for (tier, root), hashes in sorted(grouped.items())
        )

    def _push(self, event: KVEvent) -> None:
        if self._is_full:
            return
        self._num_queued += len(event.block_hashes)
        if self._num_queued > self._max_blocks:
            self._queue.clear()
            self._is_full = True
            self.overflows += 1
        else:
            self._queue.append(event)

    def _tier_of(self, node: int) -> int:
        """Slowest tier of the pages that a match of this block needs; unknown where one is missing."""
        tree, store, stores_per_tier = self._storage.tree, self._storage.pages.store, self._storage.num_pool_groups
        slowest = 0
        for group in self._required:
            page = tree.pages[group][node]
            if page == NONE:
                return _UNKNOWN
            slowest = max(slowest, store[page] // stores_per_tier)
        return slowest

    def _name(self, node: int, found: dict[int, tuple[BlockHash, int]]) -> tuple[BlockHash, int]:
        """Hash and root of a node, from its nearest ancestor that is known or in `found`, which gets all between."""
        tree = self._storage.tree
        path: list[int] = []
        at = node
        while at not in found and self._tier[at] == _UNKNOWN and tree.parent[at] != NONE:
            path.append(at)
            at = tree.parent[at]
        if at in found:
            block_hash, root = found[at]
        elif self._tier[at] != _UNKNOWN:
            block_hash, root = BlockHash(self._hash[at]), self._root[at]
        else:
            block_hash, root = scope_hash(tree.scopes[at]), at
        for at in reversed(path):
            block_hash = next_hash(block_hash, tree.tokens(at))
            found[at] = (block_hash, root)
        return block_hash, root

    def _extend(self, num_nodes: int) -> None:
        missing = num_nodes - len(self._tier)
        if missing > 0:
            self._tier.extend([_UNKNOWN] * missing)
            self._hash.extend([0] * missing)
            self._root.extend([NONE] * missing)


def replay(events: Sequence[KVEvent], known: dict[BlockHash, TierLevel]) -> None:
    """Bring `known`, the tier of every block that a worker holds, up to date; what a reader of events does."""
    for event in events:
        if event.kind is KVEventKind.CLEARED:
            known.clear()
        elif event.kind is KVEventKind.REMOVED:
            for block_hash in event.block_hashes:
                known.pop(block_hash, None)
        else:
            known.update(dict.fromkeys(event.block_hashes, event.tier))
