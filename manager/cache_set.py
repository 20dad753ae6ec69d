"""`CacheSet`: the primary, draft and cross caches of a request as one thing (M4).

    primary   |------ blocks of the request's tokens -----------|   one chain: a page of every layer group
    draft     |------ the same blocks, at most one token behind |   of the model and of its draft per block
    cross     |-- the encoder's output --|                          a chain of its own: whole, or absent

Draft layers are further layer groups of the primary's chain: reuse depth, cursor, growth, suspension and revert are one
by construction. The cross chain changes state only here, together with the other.
"""

from collections.abc import Sequence

from manager.cache_chain import CacheStatus
from manager.ids import AdapterId, RequestId
from manager.kv_cache import KVCache
from manager.page import NONE
from manager.storage.journal import Journal

PAD_TOKEN = -1
"""Fills the last block of an encoder input, so that inputs of other lengths differ."""


def padded(token_ids: Sequence[int], tokens_per_block: int) -> list[int]:
    """An encoder input as whole blocks."""
    return [*token_ids, *[PAD_TOKEN] * (-len(token_ids) % tokens_per_block)]


class CacheSet:
    """All that a request has.

    Attributes:
        request_id: whose it is.
        primary: blocks of its tokens, draft layers included.
        cross: blocks of its encoder input; None for a request without one.
        encoder_token_ids: the padded encoder input.
        adapter_id: adapter it runs with; pinned while it is active.
        index_slot: row of the per-sequence tables; NONE while suspended.
        members: the caches that exist, primary first.
    """

    __slots__ = (
        "_journal",
        "adapter_id",
        "cross",
        "encoder_token_ids",
        "index_slot",
        "members",
        "primary",
        "request_id",
    )

    def __init__(
        self,
        primary: KVCache,
        cross: KVCache | None,
        encoder_token_ids: Sequence[int],
        adapter_id: AdapterId | None,
        journal: Journal,
    ) -> None:
        """Without an index slot yet."""
        self._journal = journal
        self.request_id: RequestId = primary.request_id
        self.primary = primary
        self.cross = cross
        self.encoder_token_ids = encoder_token_ids
        self.adapter_id = adapter_id
        self.index_slot = NONE
        self.members: tuple[KVCache, ...] = (primary,) if cross is None else (primary, cross)

    @property
    def status(self) -> CacheStatus:
        """Of every member: they change together."""
        return self.primary.status

    @property
    def is_suspended(self) -> bool:
        """Whether it cannot run before a resume."""
        return self.primary.status is CacheStatus.SUSPENDED

    @property
    def is_reservation(self) -> bool:
        """Whether it waits for a transfer."""
        return self.primary.reserved_tokens > 0

    @property
    def num_cross_blocks(self) -> int:
        """Blocks of the encoder input that have a place."""
        return 0 if self.cross is None else self.cross.num_blocks

    @property
    def missing_cross_blocks(self) -> int:
        """Blocks of the encoder input that have no place yet: all or none."""
        if self.cross is None:
            return 0
        return self.cross.blocks_of(len(self.encoder_token_ids)) - self.cross.num_blocks

    @property
    def needs_encoder(self) -> bool:
        """Whether the encoder's output is still to be computed."""
        return self.cross is not None and self.cross.history < len(self.encoder_token_ids)

    def growth_per_pool(self, num_blocks: int, num_cross_blocks: int) -> list[int]:
        """Pages per pool group that `grow` would take."""
        costs = self.primary.growth_per_pool(num_blocks)
        if self.cross is not None and num_cross_blocks:
            costs = [a + b for a, b in zip(costs, self.cross.growth_per_pool(num_cross_blocks), strict=True)]
        return costs

    def grow(self, num_blocks: int, num_cross_blocks: int) -> None:
        """Add places. The caller has checked that they are available."""
        if num_blocks:
            self.primary.grow(num_blocks)
        if self.cross is not None and num_cross_blocks:
            self.cross.grow(num_cross_blocks)

    def ungrow(self, num_blocks: int, num_cross_blocks: int) -> list[int]:
        """Undo growth of this plan; returns renamed pages (`StorageManager.untake`)."""
        renamed = [] if self.cross is None else self.cross.ungrow(num_cross_blocks)
        return renamed + self.primary.ungrow(num_blocks)

    def unclaim(self) -> list[int]:
        """Undo the claims of a set made in this plan; returns renamed pages."""
        return [page for member in reversed(self.members) for page in member.unclaim()]

    def suspend(self) -> list[int]:
        """Suspend every member; returns the pages moved down."""
        return [page for member in self.members for page in member.suspend()]

    def resume(self) -> list[int]:
        """Bring every member to the device; returns device slots taken per pool group."""
        costs = [member.resume() for member in self.members]
        return [sum(parts) for parts in zip(*costs, strict=True)]

    def unresume(self) -> list[int]:
        """Undo `resume` in the same plan; returns renamed pages."""
        return [page for member in reversed(self.members) for page in member.unresume()]

    def pages_below(self) -> list[int]:
        """Pages per pool group that a resume would bring to the device."""
        return [sum(parts) for parts in zip(*[member.pages_below() for member in self.members], strict=True)]

    def reserve(self, num_tokens: int) -> None:
        """The first `num_tokens` positions, and the encoder's output, come by a transfer."""
        self.primary.reserve(num_tokens)
        if self.cross is not None:
            self.cross.reserve(len(self.encoder_token_ids))

    def activate(self, token_ids: Sequence[int], *, reuse: bool) -> None:
        """What was reserved is there."""
        num_tokens = self.primary.reserved_tokens
        for member in self.members:
            member.reserve(0)
        self.primary.advance(token_ids, num_tokens, reuse=reuse)
        self.complete_encoder(reuse=reuse)

    def complete_encoder(self, *, reuse: bool) -> None:
        """The encoder's output is in its pages."""
        if self.cross is not None and self.needs_encoder:
            self.cross.advance(self.encoder_token_ids, len(self.encoder_token_ids), reuse=reuse)

    def release(self) -> None:
        """Let every page go."""
        for member in self.members:
            member.release()

    def member_of(self, group: int) -> KVCache | None:
        """The chain that keeps a layer group; None where the request has none."""
        return next((member for member in self.members if member.has_group(group)), None)

    def rename(self, page: int) -> None:
        """`page` has another slot now: correct the tables if it is ours."""
        for member in self.members:
            member.rename(page)

    def set_index_slot(self, index_slot: int) -> None:
        """Take or lose a row."""
        self._journal.push((self._put_index_slot, (self.index_slot,)))
        self.index_slot = index_slot

    def _put_index_slot(self, index_slot: int) -> None:
        self.index_slot = index_slot
