"""Runs the same arrivals through both schedulers and adds up what the observers saw."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from configs import KVCacheConfig, SchedulerConfig
from manager import CacheGeometry, Epoch, KVCacheManager, RequestId
from manager.pools.base import CopyEngine
from scheduler.admission import TransferWindow
from scheduler.interface import IterationScheduler
from scheduler.messages import WorkerRole
from scheduler.policy import CacheShape
from serving.simulation.arrivals import Arrival
from serving.simulation.deployment import SimulatedDeployment, SimulationError
from serving.simulation.results import summarize
from serving.simulation.settings import SimulationSettings
from serving.simulation.worker import WorkerMaking
from tests.baselines.pass_observer import PassObserver
from tests.baselines.switches import Switch
from tests.baselines.try_and_see import TransactionalScheduler, TryAndSeeScheduler
from tests.baselines.watched_manager import WatchedManager


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One run of one scheduler.

    Attributes:
        makespan_s: from the first arrival to the last token; None when requests were still open at the limit.
        digest: of every token and its time.
    """

    stranded_page_iterations: int
    audit_violations: int
    divergent_budgets: int
    disagreements: int
    corrupted: int
    makespan_s: float | None
    suspensions: int
    recomputes: int
    passes: int
    failed: int
    tokens_per_s: float
    digest: str


@dataclass(slots=True)
class _Making:
    """Builds watched managers and the schedulers of one side."""

    switches: Collection[Switch] | None
    audit_every: int
    observers: list[PassObserver] = field(default_factory=list)
    reservations: dict[RequestId, Epoch] = field(default_factory=dict)

    def manager(
        self, geometry: CacheGeometry, config: KVCacheConfig, epoch: Epoch, engine: CopyEngine
    ) -> KVCacheManager:
        """The product's, watched."""
        return WatchedManager(geometry, config, epoch, engine).watch()

    def scheduler(
        self,
        config: SchedulerConfig,
        manager: KVCacheManager,
        role: WorkerRole,
        shape: CacheShape,
        window: TransferWindow,
    ) -> IterationScheduler:
        """Ours where `switches` is None."""
        assert isinstance(manager, WatchedManager)
        observer = PassObserver(manager, self.audit_every)
        self.observers.append(observer)
        if self.switches is None:
            ours = TransactionalScheduler(config, manager, role, shape, window=window)
            ours.observer = observer
            return ours
        other = TryAndSeeScheduler(
            config,
            manager,
            role,
            shape,
            window=window,
            switches=self.switches,
            reservations=self.reservations,
        )
        other.observer = observer
        return other


def run_side(settings: SimulationSettings, arrivals: Sequence[Arrival], switches: Collection[Switch] | None) -> Outcome:
    """Serve `arrivals` with ours (`switches` None) or with the other scheduler under these switches.

    Ours must end with nothing held; of the other that is not asked.
    """
    making = _Making(switches, settings.audit_every)
    # The observer audits, and goes on after a failure.
    quiet = replace(settings, audit_every=0)
    deployment = SimulatedDeployment(quiet, WorkerMaking(making.manager, making.scheduler))
    has_ended = True
    try:
        deployment.serve(arrivals)
    except SimulationError:
        if switches is None:
            raise
        has_ended = False
    results = summarize(deployment)
    if switches is None:
        deployment.check_baseline()
    observers = making.observers
    return Outcome(
        stranded_page_iterations=sum(observer.stranded_page_iterations for observer in observers),
        audit_violations=sum(observer.num_violations for observer in observers),
        divergent_budgets=sum(observer.num_divergent_budgets for observer in observers),
        disagreements=sum(observer.num_disagreements for observer in observers),
        corrupted=sum(observer.num_corrupted for observer in observers),
        makespan_s=results.makespan_s if has_ended else None,
        suspensions=results.suspensions,
        recomputes=results.recomputes,
        passes=results.passes,
        failed=results.failed,
        tokens_per_s=results.tokens_per_s,
        digest=results.digest,
    )
