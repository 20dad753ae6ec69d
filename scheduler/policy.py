"""Who goes first, who is pushed out first, and who may enter at all; pure functions of requests.

One total order decides everything, so that two requests can never push each other out in turn (S5):
whoever is earlier in it is never a victim of whoever is later.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain

from configs import SchedulerConfig, SchedulingPolicy
from manager import AdapterId, AdapterSizes, CacheGeometry, CacheMember, PageLocation, PoolGroupId, TierLevel
from scheduler.request import Request
from scheduler.states import AttemptState

Rank = tuple[int, int]

_NOT_YET_ACTIVE = frozenset({AttemptState.DISAGG_GENERATION_INIT, AttemptState.DISAGG_GENERATION_TRANS_IN_PROGRESS})


@dataclass(frozen=True, slots=True)
class Ordering:
    """The order of requests on one worker.

    Attributes:
        arrivals_per_priority: a request of one priority level more goes before this many that arrived
            before it, and before no others. So a waiting request is overtaken a bounded number of times,
            which is what ageing is for; and its key never changes, so that no queue is ever re-sorted.
    """

    arrivals_per_priority: int

    def rank(self, request: Request) -> Rank:
        """Smaller goes first; unique, since arrivals are."""
        return (request.arrival - self.arrivals_per_priority * request.priority, request.arrival)

    def first_to_last(self, requests: Iterable[Request]) -> list[Request]:
        """Sort for a pass."""
        return sorted(requests, key=self.rank)

    def victims_behind(self, request: Request, candidates: Iterable[Request]) -> list[Request]:
        """Candidates that may be pushed out for `request`: strictly behind it, the last in order first."""
        own = self.rank(request)
        behind = [(rank, other) for other in candidates if (rank := self.rank(other)) > own]
        behind.sort(reverse=True)
        return [other for _, other in behind]


@dataclass(frozen=True, slots=True)
class LayerGroupShape:
    """What one layer group keeps of a request.

    Attributes:
        pool_group: where its pages come from; one page per block.
        max_blocks: most blocks that one request keeps there (a window); None for every block.
        page_bytes: of one page.
        is_cross: it keeps encoder output: whole from the first chunk on, and never more.
    """

    pool_group: PoolGroupId
    max_blocks: int | None = None
    page_bytes: int = 0
    is_cross: bool = False

    def num_blocks(self, num_blocks: int, num_encoder_blocks: int = 0) -> int:
        """Blocks kept of a request that has `num_blocks`, and of its encoder input."""
        if self.is_cross:
            return num_encoder_blocks
        return num_blocks if self.max_blocks is None else min(num_blocks, self.max_blocks)


@dataclass(frozen=True, slots=True)
class CacheShape:
    """The sizes of a worker's cache that admission reckons with.

    Attributes:
        tokens_per_block: positions of one block.
        layer_groups: what each keeps of a request.
        total_pages: device pages of each pool group.
        max_request_tokens: positions that one request alone can have here.
        max_encoder_tokens: longest encoder input; 0 without layers for it.
        draft_padding_tokens: positions that a drafting step may write beyond its drafts.
        adapters: pages of adapters, and of the pool that they share.
    """

    tokens_per_block: int
    layer_groups: tuple[LayerGroupShape, ...]
    total_pages: Mapping[PoolGroupId, int]
    max_request_tokens: int
    max_encoder_tokens: int = 0
    draft_padding_tokens: int = 0
    adapters: AdapterSizes = field(default_factory=AdapterSizes)

    @classmethod
    def of(cls, geometry: CacheGeometry, adapters: AdapterSizes | None = None) -> "CacheShape":
        """The sizes of a manager with this geometry and these adapters."""
        groups = tuple(
            LayerGroupShape(
                group.pool_group_id, group.max_blocks, group.page_bytes, is_cross=group.member is CacheMember.CROSS
            )
            for group in geometry.layer_groups
        )
        totals = {
            pool.pool_group_id: geometry.num_slots(TierLevel.DEVICE, pool.pool_group_id)
            for pool in geometry.pool_groups
        }
        return cls(
            geometry.tokens_per_block,
            groups,
            totals,
            geometry.max_request_tokens,
            geometry.max_encoder_tokens,
            geometry.draft_padding_tokens,
            adapters or AdapterSizes(),
        )

    def num_bytes(self, pages: Iterable[PageLocation]) -> int:
        """Bytes of these pages."""
        return sum(self.layer_groups[page.layer_group].page_bytes for page in pages)

    def num_blocks(self, num_tokens: int) -> int:
        """Blocks that cover `num_tokens` positions."""
        return -(-num_tokens // self.tokens_per_block)


class PageReckoning:
    """How many pages requests may still come to need: what admission must leave free."""

    __slots__ = ("_no_evict", "_shape")

    def __init__(self, shape: CacheShape, config: SchedulerConfig) -> None:
        """`config.policy` decides between `fits_worst_case` always true and truly reckoned."""
        self._shape = shape
        self._no_evict = config.policy is SchedulingPolicy.GUARANTEED_NO_EVICT

    @property
    def tokens_per_block(self) -> int:
        """Positions of one block."""
        return self._shape.tokens_per_block

    def num_bytes(self, pages: Iterable[PageLocation]) -> int:
        """Bytes of these pages."""
        return self._shape.num_bytes(pages)

    def final_tokens(self, request: Request, *, context_only: bool) -> int:
        """Positions that need a place by the time `request` ends here.

        A context worker never has more than the known tokens. Elsewhere this is one more than is
        ever computed (the last token drawn is not), so that it equals prompt + max_tokens, the number
        that the door and the central scheduler compare with `max_request_tokens`.
        """
        if context_only:
            return len(request.token_ids)
        generated = max(request.spec.stop.max_tokens, request.num_generated + 1)
        return len(request.spec.prompt_token_ids) + generated

    def growth(self, requests: Iterable[Request]) -> dict[PoolGroupId, int]:
        """One block for each of `requests` that can ever need another (B5), in pages per pool group."""
        shape = self._shape
        pages = dict.fromkeys(shape.total_pages, 0)
        for request in requests:
            # An offer is given the place of its first decode step with its prompt (C1b).
            ahead = 1 if request.state in _NOT_YET_ACTIVE else 0
            placed = len(request.token_ids) + ahead
            if request.num_draft_tokens:
                placed += request.num_draft_tokens + shape.draft_padding_tokens
            now = shape.num_blocks(placed)
            last = shape.num_blocks(self.final_tokens(request, context_only=False))
            for group in shape.layer_groups:
                pages[group.pool_group] += group.num_blocks(last) > group.num_blocks(now)
        return pages

    def fits_worst_case(self, admitted: Iterable[Request], newcomer: Request, *, context_only: bool) -> bool:
        """Whether all could reach their last token side by side (GUARANTEED_NO_EVICT only), adapters included.

        Sharing of pages is not counted: a shared page may have to be kept by either.
        """
        if not self._no_evict:
            return True
        shape = self._shape
        pages = dict.fromkeys(shape.total_pages, 0)
        adapters: set[AdapterId] = set()
        for request in chain(admitted, (newcomer,)):
            blocks = shape.num_blocks(self.final_tokens(request, context_only=context_only))
            encoder_blocks = shape.num_blocks(len(request.encoder_token_ids))
            for group in shape.layer_groups:
                pages[group.pool_group] += group.num_blocks(blocks, encoder_blocks)
            if request.adapter_id is not None:
                adapters.add(request.adapter_id)
        if sum(shape.adapters.pages[adapter] for adapter in adapters) > shape.adapters.num_pages:
            return False
        return all(count <= shape.total_pages[group] for group, count in pages.items())
