"""The manager's public contract (design M1 to M8): what the scheduler, the loop and audits may call.

`KVCacheManagerV2` implements it. Every call belongs to exactly one of two kinds of transaction:

    plan      before a step:  prepare_context, resize_context, try_allocate_generation,
                              suspend_request, pause_for_recompute, prepare_disagg_gen_init,
                              revert_allocate_context, revert_allocate_generation
    complete  after a step:   advance, rewind, activate_disagg_gen, grant_lease, end_lease,
                              quarantine, release_quarantine, free_resources

A call outside its kind of transaction, or with two transactions open, is a LogicError. Every call has
all of its effects or none (M1). Only the loop's thread may call anything here.

Length invariant of a cache, at all times: num_committed_tokens <= history_length <= capacity.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from manager.adapters import AdapterLoad
from manager.cache_request import CacheRequest
from manager.events import KVEvent
from manager.grants import Grant, Refusal
from manager.ids import AdapterId, IndexSlot, LayerGroupId, LeaseId, RequestId
from manager.page_location import PageLease, PageLocation
from manager.stats import Availability, ManagerStats


class Savepoint(Protocol):
    """A position in the open plan; opaque."""


class Transaction(Protocol):
    """All changes of one plan or one complete; ends by `commit` or `rollback` exactly once."""

    def commit(self) -> None:
        """Publish. Cannot fail for capacity (M3). Raises LogicError when already ended."""
        ...

    def rollback(self) -> None:
        """Undo everything; afterwards the manager is identical in everything, order included."""
        ...

    def savepoint(self) -> Savepoint:
        """Mark the present state; savepoints nest."""
        ...

    def rollback_to(self, savepoint: Savepoint) -> None:
        """Undo everything since `savepoint`, exactly. The transaction stays open."""
        ...


class KVCacheManager(Protocol):
    """What `KVCacheManagerV2` offers."""

    # -- transactions ------------------------------------------------------------------------------

    def begin_plan(self) -> Transaction:
        """Open a plan. Raises LogicError when a transaction is open."""
        ...

    def begin_complete(self) -> Transaction:
        """Open a complete. Raises LogicError when a transaction is open."""
        ...

    def finish_fills(self) -> tuple[RequestId, ...]:
        """Wait for the copies that the last plan started; called between a plan and its step.

        Returns:
            Requests one of whose pages did not arrive: their caches are gone, they start again with
            `prepare_context`.
        """
        ...

    # -- plan --------------------------------------------------------------------------------------

    def prepare_context(self, request: CacheRequest) -> Grant | Refusal:
        """Make the cache exist and be active: take an index slot, claim the longest cached prefix.

        For a request without a cache: creates it, with history = capacity = claimed tokens (at most
        len(token_ids) - 1: the last known token is always computed, since its logits are needed).
        Encoder output is claimed whole or not at all; the adapter is pinned, OUT_OF_ADAPTER_PAGES where that
        cannot be. For a suspended cache: resumes it, its adapter included. For an active cache: an empty grant.
        Never grows (that is `resize_context`). Claimed pages are pinned until release.
        """
        ...

    def fork(self, source: CacheRequest, request: CacheRequest) -> Grant | Refusal:
        """Begin a new request's cache as an active one: as `prepare_context`, from a request instead of the tree.

        The prompt that both know is shared, as far as the source has computed it: full blocks by another lock, the
        block that both go on writing by a copy that is made before the step. So a fork costs one page per layer
        group where the prompt ends within a block, and an index slot. The source may go on, end or be suspended.

        Refused with CANNOT_FORK where the source has no active cache or is a reservation, where their tokens,
        scopes, adapters or encoders differ, or where a page that the fork would see is not the source's any more:
        `prepare_context` finds what there is then. Raises LogicError when `request` has a cache.
        """
        ...

    def resize_context(self, request: CacheRequest, num_tokens: int) -> Grant | Refusal:
        """Grow capacity to history_length + num_tokens, page-rounded. Never shrinks.

        Where the request has an encoder input whose output has no place yet, that gets all of it; both or neither.
        """
        ...

    def try_allocate_generation(self, request: CacheRequest) -> Grant | Refusal:
        """Resume when suspended, and grow capacity to len(token_ids) + num_draft_tokens.

        With drafts, the drafter's padding (`CacheGeometry.draft_padding_tokens`) is added (V19). Draft layers
        grow with the primary's: they are layer groups of the same chain.
        """
        ...

    def suspend_request(self, request: CacheRequest) -> Grant | Refusal:
        """ACTIVE -> SUSPENDED, every member: pages go to lower tiers, index slot and adapter are released.

        The grant's `pages` name what the lower tiers now hold. Refused with LOWER_TIERS_FULL where no
        lower tier can take them; nothing changed then.
        """
        ...

    def pause_for_recompute(self, request: CacheRequest) -> Grant:
        """Let the cache go in the plan: committed blocks stay cached and matchable, the rest is freed.

        The request starts again with `prepare_context`. Cannot be refused. Undone by a rollback.
        """
        ...

    def prepare_disagg_gen_init(self, request: CacheRequest) -> Grant | Refusal:
        """Take all that activation needs, in one attempt (C1b).

        That is: the locally cached prefix, pages for prompt_length + 1 + num_draft_tokens, an index slot,
        the adapter.
        history_length stays at the local prefix; the new pages are *filling*: not matched, moved,
        sent or evicted until `activate_disagg_gen`. Once committed it is a reservation.
        """
        ...

    def revert_allocate_context(self, request: CacheRequest) -> None:
        """Undo all that `request` acquired in this plan (claim, growth, resume, index slot, adapter).

        For any request granted earlier in this plan and any reason; others keep what they have.
        """
        ...

    def revert_allocate_generation(self, request: CacheRequest) -> None:
        """As `revert_allocate_context`, for a generation or disaggregated-init grant."""
        ...

    # -- complete ----------------------------------------------------------------------------------

    def advance(self, request: CacheRequest, num_tokens: int, draft_lag: int = 0) -> None:
        """The step computed `num_tokens` more positions, and the encoder's output when that was missing.

        `draft_lag` (0 or 1): the draft layers have not computed the last position; its block is not committed yet.

        History moves; full blocks are committed to the reuse tree under the token ids that
        `request.token_ids` has for them.
        """
        ...

    def rewind(self, request: CacheRequest, num_tokens: int) -> None:
        """Take back `num_tokens` not yet committed positions of history (rejected drafts)."""
        ...

    def activate_disagg_gen(self, request: CacheRequest) -> None:
        """A reservation's pages are verified: history = prompt_length, full blocks are committed."""
        ...

    def grant_lease(self, request: CacheRequest, num_tokens: int | None = None) -> PageLease:
        """Hold all pages of [0, history_length) for a remote reader, or of its first `num_tokens`, whole blocks.

        A block that is not full may still be written by its cache: of one that lives on, lease full blocks.
        The hold is independent of the cache: after `free_resources(request)` the pages stay until
        `end_lease`.
        """
        ...

    def end_lease(self, lease_id: LeaseId) -> None:
        """Drop the lease's holds (settled, expired or cancelled). Unknown ids raise LogicError."""
        ...

    def quarantine(self, request: CacheRequest) -> None:
        """Close a reservation whose reads may still be running.

        Its filling pages are quarantined, everything else of the request is freed.
        """
        ...

    def release_quarantine(self, request_id: RequestId) -> None:
        """The reads into the quarantined pages are done or cancelled: the slots are free."""
        ...

    def free_resources(self, request: CacheRequest) -> None:
        """Close the cache in any state and release all it holds; committed blocks stay cached.

        A request without a cache is allowed (nothing to do).
        """
        ...

    # -- reads (any time, in or out of a transaction) ------------------------------------------------

    def availability(self) -> Availability:
        """What the open plan may still take."""
        ...

    def has_cache(self, request_id: RequestId) -> bool:
        """Whether a cache exists, active or suspended."""
        ...

    def is_suspended(self, request_id: RequestId) -> bool:
        """Whether the cache exists and is suspended."""
        ...

    def history_length(self, request_id: RequestId) -> int:
        """Positions already computed."""
        ...

    def index_slot(self, request_id: RequestId) -> IndexSlot:
        """The row of an active cache."""
        ...

    def block_table(self, request_id: RequestId, layer_group: LayerGroupId) -> npt.NDArray[np.int32]:
        """Device slot per block, [num_blocks] int32, a view of the cache's own buffer (no copy).

        Of a layer group that keeps encoder output: per block of the encoder input; empty without one.

        Valid until the next transaction; -1 where a page left the window.
        """
        ...

    def draft_lag(self, request_id: RequestId) -> int:
        """Positions at the end of the history that the draft layers have not computed: 0 or 1."""
        ...

    def needs_encoder(self, request_id: RequestId) -> bool:
        """Whether the next step has to compute the encoder's output: it was not found in the cache."""
        ...

    def adapter_pages(self, adapter_id: AdapterId) -> Sequence[int]:
        """Pages of a resident adapter, in order. Raises LogicError when it is not resident."""
        ...

    def take_adapter_loads(self) -> Sequence[AdapterLoad]:
        """Adapters that committed plans made resident since the last call; load them before the next step."""
        ...

    def pages_to_fill(self, request_id: RequestId) -> Sequence[PageLocation]:
        """The filling pages of a reservation: those that cover [history_length, prompt_length), and encoder output."""
        ...

    def take_kv_events(self) -> Sequence[KVEvent]:
        """What committed transactions did to cached prefixes since the last call, oldest first; drain it every step.

        A single CLEARED event when more blocks were told of than `event_queue_blocks`: then read `known_prefixes`.
        Raises LogicError where events are off (`event_queue_blocks` = 0).
        """
        ...

    def known_prefixes(self) -> Sequence[KVEvent]:
        """All cached blocks as STORED events, as of the last commit, for whoever has heard nothing before.

        Includes what `take_kv_events` has not given out yet. Raises LogicError where events are off.
        """
        ...

    def stats(self) -> ManagerStats:
        """Counts for reports."""
        ...

    def audit(self) -> None:
        """Recompute everything from scratch; raise CorruptedError naming the first broken invariant."""
        ...

    def snapshot(self) -> object:
        """Everything that rollback must restore, order included, as a comparable value (tests, M2)."""
        ...
