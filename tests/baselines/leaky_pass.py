"""`LeakyPass`: a pass whose failed attempts are undone exactly, and then done again as far as switches say.

So whatever no switch concerns is ours, and what a switch keeps is what the manager really gave.
"""

from collections.abc import Callable, Collection, Sequence
from typing import TypeVar, cast

from manager import CacheRequest, Grant, KVCacheManager, Refusal, Transaction
from scheduler.iteration_pass import IterationPass, PassDecisions, PassMark
from scheduler.request import Request
from scheduler.request_table import RequestTable
from tests.baselines.driven_manager import Call, DrivenManager, Kind, pushed_out
from tests.baselines.leaky_budget import LeakyBudget
from tests.baselines.switches import Switch

Given = TypeVar("Given")


class LeakyPass(IterationPass):
    """The open plan of one iteration, elsewhere.

    Attributes:
        driven: the manager as planners see it.
        kept: calls that were done again after their attempt failed, in order.
        refused_growth: the last context attempt that had grown before it failed (V12).
    """

    __slots__ = ("_leaky_budget", "_marks", "_switches", "_table", "driven", "kept", "refused_growth")

    def __init__(
        self,
        driven: DrivenManager,
        transaction: Transaction,
        budget: LeakyBudget,
        decisions: PassDecisions,
        table: RequestTable,
        switches: Collection[Switch],
    ) -> None:
        """As `IterationPass`; `table` is for victims that hold nothing (V8)."""
        super().__init__(cast("KVCacheManager", driven), transaction, budget, decisions)
        self.driven = driven
        self.kept: list[Call] = []
        self.refused_growth: list[Call] = []
        self._leaky_budget = budget
        self._marks: list[tuple[PassMark, int, int]] = []
        self._table = table
        self._switches = switches

    def mark(self) -> PassMark:
        """The present position, the log's included."""
        mark = super().mark()
        self._marks.append((mark, len(self.driven.log), len(self.kept)))
        return mark

    def return_to(self, mark: PassMark) -> None:
        """Undo since `mark`, then do again what would not have been undone elsewhere."""
        log = self.driven.log
        place, num_kept = next((place, kept) for known, place, kept in self._marks if known is mark)
        undone = log[place:]
        super().return_to(mark)
        del log[place:]
        del self.kept[num_kept:]
        if any(call.kind is Kind.RESIZE for call in undone):
            self.refused_growth = [call for call in undone if call.kind in {Kind.PREPARE, Kind.RESIZE}]
        for call in undone:
            self._keep(call, undone)
        self._free_outright(undone)

    def push_out(self, victim: Request) -> None:
        """A victim that holds nothing is a silent no-op, and counts (V8)."""
        if self.is_active(victim):
            super().push_out(victim)
        else:
            self.decisions.pushed_out[victim.request_id] = (victim, True)
        self.driven.log.append(pushed_out(victim))

    def try_with_victims(
        self,
        request: Request,
        attempt: Callable[[Request], Given | Refusal | None],
        victims: Callable[[], Sequence[Request]],
    ) -> Given | Refusal | None:
        """As ours; with V8 among victims that may hold nothing, tried first."""

        def all_victims() -> list[Request]:
            absent = []
            if Switch.V8 in self._switches:
                behind = self._table.ordering.victims_behind(request, self._table.contexts.values())
                absent = [other for other in behind if not (self.is_active(other) or self.is_pushed_out(other))]
            return [*absent, *victims()]

        return super().try_with_victims(request, attempt, all_victims)

    # -- what stays --------------------------------------------------------------------------------------

    def _keep(self, call: Call, undone: Sequence[Call]) -> None:
        on = self._switches
        match call.kind:
            case Kind.PREPARE:
                is_resize_refused = any(
                    other.kind is Kind.RESIZE_REFUSED and other.request is call.request for other in undone
                )
                if Switch.V10 in on and is_resize_refused:
                    self.keep_suspended(call)
                elif Switch.V1 in on:
                    self.keep_prepared(call)
            case Kind.RESIZE if Switch.V2 in on:
                self.keep_prepared(call)
                self.keep_grown(call)
            case Kind.RESUME:
                self.driven.resume(call.request)
            case Kind.INIT_LEFTOVER:
                self.driven.keep_init(call.request)
            case Kind.PUSH_OUT if Switch.V6 in on and isinstance(call.request, Request):
                if self.is_active(call.request):
                    self.push_out(call.request)
            case _:
                pass

    def keep_prepared(self, call: Call) -> None:
        """The cache stays, with its claim and its index slot."""
        self._charge(self.driven.prepare_context(call.request))
        self.kept.append(call)

    def keep_grown(self, call: Call) -> None:
        """The growth stays."""
        if self.driven.has_cache(call.request.request_id):
            self._charge(self.driven.resize_context(call.request, call.num_tokens))
            self.kept.append(call)

    def keep_suspended(self, call: Call) -> None:
        """The cache stays, but goes to a lower tier."""
        if isinstance(self.driven.prepare_context(call.request), Grant):
            self.driven.suspend_request(call.request)
            self._leaky_budget.restart(self.driven.availability())

    def _free_outright(self, undone: Sequence[Call]) -> None:
        """V11: a revert of a request with history frees its cache."""
        if Switch.V11 not in self._switches:
            return
        for request in {id(call.request): call.request for call in undone if call.kind is Kind.RESIZE}.values():
            if self._is_started(request):
                self.driven.pause_for_recompute(request)
                self._leaky_budget.restart(self.driven.availability())

    def _is_started(self, request: CacheRequest) -> bool:
        request_id = request.request_id
        has_history = self.driven.has_cache(request_id) and self.driven.history_length(request_id) > 0
        return has_history and request_id in self._table.contexts

    def _charge(self, answer: Grant | Refusal) -> None:
        if isinstance(answer, Grant) and Switch.V15 not in self._switches:
            self._leaky_budget.commit(answer)
