"""`StepContents`: the memory under an iteration worker, and what its steps write into it.

Each position of a page carries a value of the whole token prefix up to it, of its layer group, and of the adapter
and the encoder input of its request. A step first checks every position that it would read, then writes its own; so a
page that was lost, shared by mistake, moved wrongly or handed on too early is seen by the next step that reads it.
Rejected drafts, failed steps and transfers that are not verified leave garbage where they are allowed to.
"""

from collections.abc import Iterable, Sequence
from itertools import accumulate
from zlib import crc32

import numpy as np
import numpy.typing as npt

from manager import (
    CacheGeometry,
    CacheMember,
    CacheRequest,
    KVCacheManagerV2,
    LayerGroup,
    PageLease,
    PageLocation,
    RequestId,
)
from manager.pools.base import SlotCopy

_MODULUS = (1 << 31) - 1
_GARBAGE = -7


class StepContents:
    """Device memory and lower tiers; a `CopyEngine` that copies at once."""

    def __init__(self, geometry: CacheGeometry) -> None:
        """Zeroed slots of every tier, [num_slots, tokens_per_block] int64 per store."""
        self._geometry = geometry
        size = geometry.tokens_per_block
        self._stores: list[npt.NDArray[np.int64]] = [
            np.zeros((pool.num_slots[place], size), np.int64)
            for place in range(len(geometry.tiers))
            for pool in geometry.pool_groups
        ]
        self._filling: dict[RequestId, list[PageLocation]] = {}

    # -- manager.pools.base.CopyEngine -----------------------------------------------------------------

    def stage(self, copies: Sequence[SlotCopy]) -> None:
        """Copy."""
        for copy in copies:
            self._stores[copy.target_store][copy.target_slot] = self._stores[copy.source_store][copy.source_slot]

    def fill(self, copies: Sequence[SlotCopy]) -> None:
        """Copy."""
        self.stage(copies)

    def wait(self) -> Sequence[SlotCopy]:
        """Nothing fails here."""
        return ()

    def close(self) -> None:
        """Nothing to stop."""

    # -- what steps and transfers do ---------------------------------------------------------------------

    def check(self, manager: KVCacheManagerV2, request: CacheRequest, tokens: Sequence[int]) -> None:
        """Every computed position holds its value, in every layer group that keeps some of the request."""
        request_id = request.request_id
        history, lag = manager.history_length(request_id), manager.draft_lag(request_id)
        for group in self._geometry.layer_groups:
            if group.member is CacheMember.CROSS:
                expected = [] if manager.needs_encoder(request_id) else self._values(request, group, ())
            else:
                computed = history - (lag if group.member is CacheMember.DRAFT else 0)
                expected = self._values(request, group, tokens[:computed])
            pages = self._pages(group)[manager.block_table(request_id, group.layer_group_id)]
            found = pages.reshape(-1)[: len(expected)].tolist()
            assert found == expected, f"{request_id}: layer group {group.layer_group_id} lost positions of its history"

    def write(self, manager: KVCacheManagerV2, request: CacheRequest, tokens: Sequence[int], span: range) -> None:
        """A step computes the positions of `span`, what the draft lacks, and the encoder's output if it is missing."""
        request_id = request.request_id
        for group in self._geometry.layer_groups:
            if group.member is CacheMember.CROSS:
                if manager.needs_encoder(request_id):
                    values = self._values(request, group, ())
                    self._put(manager, request_id, group, range(len(values)), values)
                continue
            lag = manager.draft_lag(request_id) if group.member is CacheMember.DRAFT else 0
            values = self._values(request, group, tokens[: span.stop])
            self._put(manager, request_id, group, range(span.start - lag, span.stop), values[span.start - lag :])

    def spoil(self, manager: KVCacheManagerV2, request: CacheRequest, span: range, *, with_encoder: bool) -> None:
        """A step computes there what nobody may ever read: rejected drafts, or a step that fails."""
        request_id = request.request_id
        for group in self._geometry.layer_groups:
            used = span
            if group.member is CacheMember.CROSS:
                is_spoilt = with_encoder and manager.needs_encoder(request_id)
                used = range(len(self._values(request, group, ())) if is_spoilt else 0)
            self._put(manager, request_id, group, used, [_GARBAGE] * len(used))

    def begin_transfer(self, manager: KVCacheManagerV2, request_id: RequestId) -> None:
        """Reads into the pages of a reservation begin."""
        self._filling[request_id] = list(manager.pages_to_fill(request_id))

    def end_transfer(self, request_id: RequestId) -> None:
        """No read runs any more; may be called twice."""
        self._filling.pop(request_id, None)

    def read_on(self) -> None:
        """Every read that runs writes something unfinished, also where the request was cancelled meanwhile."""
        for location in (location for pages in self._filling.values() for location in pages):
            self._pages(self._geometry.layer_groups[location.layer_group])[location.slot] = _GARBAGE

    def check_lease(self, lease: PageLease, request: CacheRequest, tokens: Sequence[int]) -> None:
        """A reader finds the history that was leased."""
        size = self._geometry.tokens_per_block
        for location in lease.pages:
            group = self._geometry.layer_groups[location.layer_group]
            values = self._values(request, group, tokens[: lease.num_tokens])
            expected = values[location.block * size : (location.block + 1) * size]
            found = self._pages(group)[location.slot][: len(expected)].tolist()
            assert found == expected, f"lease {lease.lease_id}: block {location.block} was overwritten"

    def _pages(self, group: LayerGroup) -> npt.NDArray[np.int64]:
        """[num_slots, tokens_per_block], the device's."""
        return self._stores[group.pool_group_id]

    def _put(
        self,
        manager: KVCacheManagerV2,
        request_id: RequestId,
        group: LayerGroup,
        span: range,
        values: Iterable[int],
    ) -> None:
        size = self._geometry.tokens_per_block
        table, pages = manager.block_table(request_id, group.layer_group_id), self._pages(group)
        for position, value in zip(span, values, strict=True):
            pages[table[position // size], position % size] = value

    def _values(self, request: CacheRequest, group: LayerGroup, tokens: Sequence[int]) -> list[int]:
        """A value for each position, of everything up to it; of the encoder's output, of its whole input."""
        start = crc32(repr((request.adapter_id, tuple(request.encoder_token_ids))).encode())
        if group.member is CacheMember.CROSS:
            tokens = request.encoder_token_ids
        chained = accumulate(tokens, lambda before, token: (before * 1_000_003 + token + 1) % _MODULUS, initial=start)
        return [value + int(group.layer_group_id) for value in list(chained)[1:]]
