"""`DrivenManager`: the manager as the planners of the try-and-see scheduler see it in one pass.

Passes every call on to the real one, logs what it gave, and after a refusal does what the other scheduler has
done by then (V3, V5, V17, V18). Nothing of the manager itself is changed.
"""

from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum, auto

from manager import Availability, CacheRequest, Grant, Refusal, RefusalReason, RequestId
from scheduler.request import Request
from tests.baselines.leaky_budget import LeakyBudget
from tests.baselines.switches import Switch
from tests.baselines.watched_manager import WatchedManager


class Kind(Enum):
    """What a call of the plan was for."""

    PREPARE = auto()
    RESIZE = auto()
    RESIZE_REFUSED = auto()
    RESUME = auto()
    INIT_LEFTOVER = auto()
    PUSH_OUT = auto()


@dataclass(frozen=True, slots=True)
class Call:
    """One logged call; `is_first` when it made the cache."""

    kind: Kind
    request: CacheRequest
    num_tokens: int = 0
    is_first: bool = False


@dataclass(frozen=True, slots=True)
class WithoutFirstPlace:
    """A request for whose first decode nothing is reserved (V18)."""

    request: CacheRequest

    def __getattr__(self, name: str) -> object:
        return getattr(self.request, name)

    @property
    def num_draft_tokens(self) -> int:
        """One place less than the manager adds by itself."""
        return self.request.num_draft_tokens - 1


class DrivenManager:
    """The calls that planners make.

    Attributes:
        log: what was given in this pass and not undone.
    """

    def __init__(self, manager: WatchedManager, budget: LeakyBudget, switches: Collection[Switch]) -> None:
        """Made for one pass."""
        self.real = manager
        self.log: list[Call] = []
        self._budget = budget
        self._switches = switches

    # -- with a memory -------------------------------------------------------------------------------

    def prepare_context(self, request: CacheRequest) -> Grant | Refusal:
        """A claim or a resume."""
        answer = self.real.prepare_context(request)
        if isinstance(answer, Grant) and answer.index_slots:
            self.log.append(Call(Kind.PREPARE, request, is_first=True))
        return answer

    def resize_context(self, request: CacheRequest, num_tokens: int) -> Grant | Refusal:
        """Growth."""
        answer = self.real.resize_context(request, num_tokens)
        if isinstance(answer, Grant):
            self._budget.asked_tokens = num_tokens if answer.pages else 0
            self.log.append(Call(Kind.RESIZE, request, num_tokens))
        else:
            self.log.append(Call(Kind.RESIZE_REFUSED, request, num_tokens))
        return answer

    def try_allocate_generation(self, request: CacheRequest) -> Grant | Refusal:
        """A decode's place; where it is refused to a suspended request, its cache may stay resumed (V3, V17)."""
        answer = self.real.try_allocate_generation(request)
        if isinstance(answer, Grant):
            self._budget.asked_tokens = 1
            self._budget.unseen_blocks = self._padding_blocks(request) if answer.pages else 0
            self._drop_kept(request, answer)
        elif answer.reason is RefusalReason.OUT_OF_PAGES and self.real.is_suspended(request.request_id):
            self.resume(request)
        return answer

    def prepare_disagg_gen_init(self, request: CacheRequest) -> Grant | Refusal:
        """All of an init; where it is refused, what was prepared may stay (V5)."""
        if self.real.has_cache(request.request_id):
            self.real.pause_for_recompute(request)  # what an earlier refusal kept is part of this attempt
            self._budget.restart(self.real.availability())
        wanted = WithoutFirstPlace(request) if Switch.V18 in self._switches else request
        answer = self.real.prepare_disagg_gen_init(wanted)  # type: ignore[arg-type]
        if isinstance(answer, Grant):
            self._budget.asked_tokens = request.prompt_length + 1 - answer.reused_tokens
        elif answer.reason is RefusalReason.OUT_OF_PAGES:
            self.keep_init(request)
        return answer

    def _padding_blocks(self, request: CacheRequest) -> int:
        """Blocks that only the drafter's padding needed."""
        geometry, num_tokens = self.real.geometry, len(request.token_ids) + request.num_draft_tokens
        padding = geometry.draft_padding_tokens if request.num_draft_tokens else 0
        return geometry.num_blocks(num_tokens + padding) - geometry.num_blocks(num_tokens)

    def _drop_kept(self, request: CacheRequest, grant: Grant) -> None:
        """A resumed request uses the adapter that it kept (V20)."""
        if Switch.V20 in self._switches and grant.index_slots and request.adapter_id is not None:
            self.real.drop_kept_adapter(request.adapter_id)

    # -- what stays after a refusal --------------------------------------------------------------------

    def resume(self, request: CacheRequest) -> None:
        """V3: resumed, and charged; V17: resumed, and not even that."""
        if Switch.V3 in self._switches or Switch.V17 in self._switches:
            answer = self.real.prepare_context(request)
            if isinstance(answer, Grant):
                self.log.append(Call(Kind.RESUME, request))
                if Switch.V17 not in self._switches:
                    self._budget.commit(answer)

    def keep_init(self, request: CacheRequest) -> None:
        """V5: the claim and the index slot stay."""
        if Switch.V5 in self._switches:
            answer = self.real.prepare_context(request)
            if isinstance(answer, Grant):
                self.log.append(Call(Kind.INIT_LEFTOVER, request))
                if Switch.V15 not in self._switches:
                    self._budget.commit(answer)

    # -- passed on -------------------------------------------------------------------------------------

    def suspend_request(self, request: CacheRequest) -> Grant | Refusal:
        """As the real one's; its adapter may stay (V20)."""
        answer = self.real.suspend_request(request)
        if Switch.V20 in self._switches and isinstance(answer, Grant):
            self.real.keep_adapter(request)
        return answer

    def pause_for_recompute(self, request: CacheRequest) -> Grant:
        """As the real one's."""
        was_suspended = self.real.is_suspended(request.request_id)
        answer = self.real.pause_for_recompute(request)
        if was_suspended and request.adapter_id is not None and Switch.V20 in self._switches:
            self.real.drop_kept_adapter(request.adapter_id)
        return answer

    def has_cache(self, request_id: RequestId) -> bool:
        """As the real one's."""
        return self.real.has_cache(request_id)

    def is_suspended(self, request_id: RequestId) -> bool:
        """As the real one's."""
        return self.real.is_suspended(request_id)

    def history_length(self, request_id: RequestId) -> int:
        """As the real one's."""
        return self.real.history_length(request_id)

    def availability(self) -> Availability:
        """As the real one's."""
        return self.real.availability()


def pushed_out(victim: Request) -> Call:
    """The log entry of a victim."""
    return Call(Kind.PUSH_OUT, victim)
