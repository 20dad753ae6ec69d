"""`CacheChain`: the journaled state of one request's cache: its blocks, its three lengths, its block tables.

Knows how to change each part so that it can be undone; `kv_cache` knows when and why.
"""

from collections.abc import Sequence
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from manager.block_tables import BlockTables
from manager.digests import BlockDigests
from manager.geometry import CacheGeometry, ChainLayout
from manager.ids import BlockOrdinal, LayerGroupId, RequestId, SlotId
from manager.page import NONE, PageState
from manager.page_location import PageLocation
from manager.storage.journal import Journal
from manager.storage_manager import StorageManager

_COMMITTED = int(PageState.COMMITTED)


def _present(pages: Sequence[int]) -> list[int]:
    """Without those that left the window."""
    return [page for page in pages if page != NONE] if NONE in pages else list(pages)


def _overlap(span: range, other: range) -> range:
    """Common part of two ranges; empty, and within `span`, where there is none."""
    first = min(max(span.start, other.start), span.stop)
    return range(first, max(first, min(span.stop, other.stop)))


class CacheStatus(StrEnum):
    """Whether the request can run."""

    ACTIVE = "active"
    SUSPENDED = "suspended"


class CacheChain:
    """Pages of one request.

    Attributes:
        request_id: whose it is.
        status: active, or suspended.
        priority: of the request; decides how long its blocks stay cached.
        history: positions already computed.
        num_blocks: blocks that have a place.
        num_committed: blocks that are in the tree.
        room: positions that a step may fill now: its capacity, or -1 while it is suspended.
        quiet_until: while the history is shorter, a longer one commits nothing and leaves no window.
        num_claimed: blocks found in the cache when it was created.
        draft_lag: positions at the history's end that the draft layers have not computed; at most one.
        reserved_tokens: positions whose pages wait for a transfer and must not be written by a step; 0 once
            activated, and for a cache that is computed here.
        pages: per layer group of the chain, page record per block; NONE where a page left the window.
        digests: of its full blocks, as far as hashed.
    """

    __slots__ = (
        "_first_group",
        "_geometry",
        "_groups",
        "_has_windows",
        "_journal",
        "_layout",
        "_leaf",
        "_num_passed",
        "_storage",
        "_tables",
        "digests",
        "draft_lag",
        "history",
        "num_blocks",
        "num_claimed",
        "num_committed",
        "pages",
        "priority",
        "quiet_until",
        "request_id",
        "reserved_tokens",
        "room",
        "status",
    )

    def __init__(
        self,
        request_id: RequestId,
        digests: BlockDigests,
        layout: ChainLayout,
        geometry: CacheGeometry,
        storage: StorageManager,
        journal: Journal,
    ) -> None:
        """Start empty and active; `layout` names the layer groups of the chain."""
        self._layout = layout
        self._geometry = geometry
        self._storage = storage
        self._journal = journal
        self.request_id = request_id
        self.digests = digests
        self.status = CacheStatus.ACTIVE
        self.priority = 0
        self.history = 0
        self.num_blocks = 0
        self.num_committed = 0
        self.room = 0
        self.quiet_until = 0 if layout.has_windows else geometry.tokens_per_block
        self.num_claimed = 0
        self.draft_lag = 0
        self.reserved_tokens = 0
        self.pages: list[list[int]] = [[] for _ in layout.groups]
        self._groups = layout.groups
        # Layer groups of a chain have no gap: `first + place` is the id of the one at `place`.
        self._first_group = layout.groups[0]
        self._has_windows = layout.has_windows
        # Per layer group, blocks before this one have been looked at when they left the window.
        self._num_passed = [0] * len(layout.groups)
        self._leaf = NONE
        self._tables = BlockTables(len(layout.groups), storage.pages, journal)

    @property
    def capacity(self) -> int:
        """Positions that have a place."""
        return self.num_blocks * self._geometry.tokens_per_block

    def block_table(self, group: int) -> npt.NDArray[np.int32]:
        """[num_blocks] device slots, read-only; a view of the buffer."""
        return self._tables.view(group - self._first_group, self.num_blocks)

    def has_group(self, group: int) -> bool:
        """Whether the layer group is one of the chain's."""
        return 0 <= group - self._first_group < len(self._groups)

    def blocks_of(self, num_tokens: int) -> int:
        """Blocks that cover [0, num_tokens)."""
        return self._geometry.num_blocks(num_tokens)

    def by_group(self) -> list[tuple[LayerGroupId, list[int]]]:
        """Its pages with the ids of their layer groups."""
        return list(zip(self._groups, self.pages, strict=True))

    @property
    def is_suspended(self) -> bool:
        """Whether it cannot run before a resume."""
        return self.status is CacheStatus.SUSPENDED

    @property
    def is_reservation(self) -> bool:
        """Whether it waits for a transfer."""
        return self.reserved_tokens > 0

    @property
    def filling_blocks(self) -> tuple[int, int]:
        """Blocks [first, last) that the transfer fills."""
        size = self._geometry.tokens_per_block
        return self.history // size, -(-self.reserved_tokens // size)

    def locate(self, first: int, last: int) -> tuple[PageLocation, ...]:
        """Pages of blocks [first, last), by block then layer group; pages that left the window are skipped."""
        slot = self._storage.pages.slot
        return tuple(
            PageLocation(BlockOrdinal(block), group, SlotId(slot[pages[block]]))
            for block in range(first, last)
            for group, pages in zip(self._groups, self.pages, strict=True)
            if pages[block] != NONE
        )

    @property
    def leaf(self) -> int:
        """Tree node of the last committed block, or NONE."""
        return self._leaf

    def _stale(self, group: int, history: int) -> range:
        return self._geometry.layer_groups[group].stale_blocks(history, self._geometry.tokens_per_block)

    def _set_lengths(self, history: int, num_committed: int, leaf: int) -> None:
        self._journal.push((self._put_lengths, (self.history, self.num_committed, self._leaf)))
        self._put_lengths(history, num_committed, leaf)

    def put_history(self, history: int) -> None:
        """Move the history and nothing else; in a journal, the inverse of having done so."""
        self.history = history

    def _put_lengths(self, history: int, num_committed: int, leaf: int) -> None:
        self.history = history
        self.num_committed = num_committed
        self._leaf = leaf
        if not self._has_windows:
            self.quiet_until = (num_committed + 1) * self._geometry.tokens_per_block

    def _set_num_blocks(self, num_blocks: int) -> None:
        self._journal.push((self._put_num_blocks, (self.num_blocks,)))
        self._put_num_blocks(num_blocks)

    def _write_tables(self, first: int) -> None:
        for place, pages in enumerate(self.pages):
            self._tables.write(place, first, pages[first:])

    def _set_status(self, status: CacheStatus) -> None:
        self._journal.push((self._put_status, (self.status,)))
        self._put_status(status)

    def _put_status(self, status: CacheStatus) -> None:
        self.status = status
        self.room = self.capacity if status is CacheStatus.ACTIVE else -1

    def _cut(self, num_blocks: int) -> list[list[int]]:
        """Shorten the chain to `num_blocks`; returns per layer group the pages cut off."""
        self._tables.keep(num_blocks, self.num_blocks)
        cut = []
        for pages in self.pages:
            dropped = pages[num_blocks:]
            del pages[num_blocks:]
            self._journal.push((pages.extend, (dropped,)))
            cut.append(dropped)
        self._set_num_blocks(num_blocks)
        return cut

    def _put_num_blocks(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        if self.status is CacheStatus.ACTIVE:
            self.room = num_blocks * self._geometry.tokens_per_block

    def _put_draft_lag(self, draft_lag: int) -> None:
        self.draft_lag = draft_lag

    def _put_reserved(self, num_tokens: int) -> None:
        self.reserved_tokens = num_tokens

    def _trim(self, place: int, count: int) -> None:
        del self.pages[place][count:]
