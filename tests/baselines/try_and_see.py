"""`TryAndSeeScheduler`: drives the product's manager as a scheduler does that tries, and trusts the answer.

It differs from ours by switches V1 to V20 only (`switches.py`): with none of them on, every decision is ours.
What a switch keeps after a failed attempt lives in the manager like anything else that was granted, so the
damage is real pages, real suspensions and real waiting.

Source: the left column of `scheduler/DIVERGENCE.md`, as the maintainers of TensorRT-LLM describe their
`KVCacheV2Scheduler`; no code of theirs.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass

from configs import SchedulerConfig
from manager import Epoch, PoolGroupId, RequestId
from scheduler.admission import TransferWindow
from scheduler.iteration_pass import IterationPass, PassDecisions
from scheduler.kv_cache_v2_scheduler import KVCacheV2Scheduler
from scheduler.messages import WorkerRole
from scheduler.output import SchedulerOutput
from scheduler.policy import CacheShape
from tests.baselines.driven_manager import DrivenManager, Kind
from tests.baselines.leaky_budget import LeakyBudget
from tests.baselines.leaky_pass import LeakyPass
from tests.baselines.pass_observer import PassObserver
from tests.baselines.switches import Switch
from tests.baselines.watched_manager import WatchedManager


@dataclass(frozen=True, slots=True)
class Leftover:
    """A cache without a request: all that the manager reads of it to let it go."""

    request_id: RequestId


class TransactionalScheduler(KVCacheV2Scheduler):
    """Ours, looked at."""

    observer: PassObserver

    def schedule(self, now_s: float) -> SchedulerOutput:
        """As ours."""
        self.observer.before()
        output = super().schedule(now_s)
        self.observer.after(output, self._table)
        return output


class TryAndSeeScheduler(KVCacheV2Scheduler):
    """The other, looked at."""

    observer: PassObserver

    def __init__(  # noqa: PLR0913 -- those of ours, and two of the comparison
        self,
        config: SchedulerConfig,
        manager: WatchedManager,
        role: WorkerRole,
        shape: CacheShape,
        *,
        window: TransferWindow | None = None,
        switches: Collection[Switch],
        reservations: dict[RequestId, Epoch],
    ) -> None:
        """As ours, and what is the comparison's.

        Args:
            config: as ours.
            manager: as ours, watched.
            role: as ours.
            shape: as ours.
            window: as ours.
            switches: those that are on.
            reservations: shared by all workers: who reserved an attempt last. Elsewhere a deferred init stays
                where it is; here it may be offered to another worker, and what it left (V5) must go then.
        """
        super().__init__(config, manager, role, shape, window=window)
        self._watched = manager
        self._reservations = reservations
        self._switches = frozenset(switches)

    def schedule(self, now_s: float) -> SchedulerOutput:
        """As ours."""
        self.observer.before()
        output = super().schedule(now_s)
        self._reservations.update((request.request_id, self._watched.epoch) for request in output.reserved)
        self.observer.after(output, self._table)
        return output

    def _plan(self, run_planners: Callable[[IterationPass], None]) -> tuple[PassDecisions, bool]:
        """As ours, but nothing proves the budget, and a fruitless pass keeps what switches keep."""
        transaction = self._watched.begin_plan()
        self._drop_leftovers()
        decisions = PassDecisions()
        budget = LeakyBudget(
            rows=self._config.max_num_tokens,
            requests=self._config.max_batch_size,
            availability=self._watched.availability(),
            switches=self._switches,
            believed_free=self._believed_free,
            tokens_per_block=self._shape.tokens_per_block,
        )
        driven = DrivenManager(self._watched, budget, self._switches)
        plan = LeakyPass(driven, transaction, budget, decisions, self._table, self._switches)
        try:
            run_planners(plan)
            budget.reconcile(self._watched.availability())
        except BaseException:
            self._undo(decisions)
            transaction.rollback()
            raise
        self.observer.num_divergent_budgets += budget.diverged
        if not decisions.is_worth_commit:
            if not self._keeps_fruitless(plan):
                self._undo(decisions)
                transaction.rollback()
                return decisions, False
            if Switch.V12 in self._switches:
                self._keep_growth(plan)
            # Something is different now, so the next pass must come without an event.
            decisions.restarts = bool(decisions.pushed_out)
        transaction.commit()
        return decisions, True

    def _drop_leftovers(self) -> None:
        for request_id in self._watched.asked:
            taken_by = self._reservations.get(request_id, self._watched.epoch)
            if taken_by != self._watched.epoch and self._watched.has_cache(request_id):
                self._watched.pause_for_recompute(Leftover(request_id))  # type: ignore[arg-type]

    def _keeps_fruitless(self, plan: LeakyPass) -> bool:
        """Whether anything of a pass that cannot run would stay elsewhere."""
        kinds = {call.kind for call in plan.driven.log}
        keeps_caches = bool(kinds & {Kind.PREPARE, Kind.RESIZE, Kind.RESUME, Kind.INIT_LEFTOVER})
        keeps_victims = Kind.PUSH_OUT in kinds and not self._switches.isdisjoint({Switch.V6, Switch.V12})
        keeps_growth = Switch.V12 in self._switches and bool(plan.refused_growth)
        return keeps_caches or keeps_victims or keeps_growth

    def _keep_growth(self, plan: LeakyPass) -> None:
        for call in plan.refused_growth:
            if call.kind is Kind.PREPARE:
                plan.keep_prepared(call)
            else:
                plan.keep_grown(call)

    def _believed_free(self) -> int:
        """V14: all pages, less those that the scheduler's own requests should have."""
        used = sum(self._shape.num_blocks(len(request.token_ids)) for request in self._table.admitted())
        return self._shape.total_pages[PoolGroupId(0)] - used
