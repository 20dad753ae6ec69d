"""`SimulatedWorker`: one life of a worker: the real loop, scheduler, manager and agent on virtual time.

An iteration is one call of the real loop. It begins at the present event and ends on the worker's own clock,
which the simulated engine moves on; what it says leaves at that end:

    event at t          the worker's clock           event at t + step
    run_once() ───────► commands, plan, step ──────► reports and tokens leave, the account changes hands
                                                     and the next iteration begins

Meanwhile the agent goes on by events of its own, as its thread does. What it brings about waits for the loop.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from configs import KVCacheConfig, SchedulerConfig
from kvtransfer import TransferAgent
from kvtransfer.messages import GroupLayout, PoolLayout
from manager import CacheGeometry, Epoch, KVCacheManager, KVCacheManagerV2
from manager.pools.base import CopyEngine
from scheduler.admission import TransferAdmission, TransferWindow
from scheduler.interface import IterationScheduler
from scheduler.kv_cache_v2_scheduler import KVCacheV2Scheduler
from scheduler.messages import (
    CommandBatch,
    ReportBatch,
    TokenBatch,
    WorkerHeartbeat,
    WorkerRegistration,
    WorkerRole,
    WorkerSnapshot,
)
from scheduler.policy import CacheShape
from serving.simulation.engine import SimulatedEngine
from serving.simulation.network import VirtualNetwork, VirtualPeers, VirtualTransport
from serving.simulation.settings import SimulationSettings
from serving.simulation.tier_copies import TierCopies
from serving.workers.batch_builder import BatchBuilder
from serving.workers.draw_rules import DrawRules
from serving.workers.outbox import Outbox
from serving.workers.prefix_feed import PrefixFeed
from serving.workers.self_audit import SelfAudit
from serving.workers.staging import SharedPool
from serving.workers.step_loop import WorkerLoop
from serving.workers.stop_checker import StopChecker, StopStringDetector
from serving.workers.worker_parts import WorkerParts
from serving.workers.worker_plan import WorkerIdentity

MakeManager = Callable[[CacheGeometry, KVCacheConfig, Epoch, CopyEngine], KVCacheManager]
"""Builds the manager of one life."""
MakeScheduler = Callable[[SchedulerConfig, KVCacheManager, WorkerRole, CacheShape, TransferWindow], IterationScheduler]
"""Builds the scheduler of one life over its manager."""


def real_manager(geometry: CacheGeometry, config: KVCacheConfig, epoch: Epoch, engine: CopyEngine) -> KVCacheManager:
    """The product's."""
    return KVCacheManagerV2(geometry, config, epoch, engine)


def real_scheduler(
    config: SchedulerConfig, manager: KVCacheManager, role: WorkerRole, shape: CacheShape, window: TransferWindow
) -> IterationScheduler:
    """The product's."""
    return KVCacheV2Scheduler(config, manager, role, shape, window=window)


@dataclass(frozen=True, slots=True)
class WorkerMaking:
    """What takes the places of manager and scheduler; the product's own unless a comparison wants others."""

    manager: MakeManager = real_manager
    scheduler: MakeScheduler = real_scheduler


@dataclass(frozen=True, slots=True)
class Receivers:
    """Where a worker's messages arrive, a message's time after they were sent."""

    reports: Callable[[ReportBatch], None]
    heartbeat: Callable[[WorkerHeartbeat], None]
    tokens: Callable[[TokenBatch], None]


@dataclass(slots=True)
class WorkerTally:
    """What one life adds up.

    Attributes:
        num_iterations: turns of the loop that did something.
        num_audits: audits of its manager, none of which failed.
        busy_s: time in iterations.
        page_share_seconds: share of the device's pages that were in use, times the iterations' seconds.
        peak_page_share: its greatest value.
    """

    num_iterations: int = 0
    num_audits: int = 0
    busy_s: float = 0.0
    page_share_seconds: float = 0.0
    peak_page_share: float = 0.0


class SimulatedWorker:
    """One life of one worker; implements the loop's `WorkerSinks`."""

    def __init__(
        self,
        identity: WorkerIdentity,
        settings: SimulationSettings,
        network: VirtualNetwork,
        receivers: Receivers,
        making: WorkerMaking,
    ) -> None:
        """Build it and join the network; it does nothing until something arrives, but beats from `start` on."""
        self.identity = identity
        self.tally = WorkerTally()
        self._settings = settings
        self._events = network.events
        self._network = network
        self._receivers = receivers
        self._clock_s = self._events.now_s
        self._ends_s = float("inf")
        self._is_busy = False
        self._poll_due_s = float("inf")
        geometry, cache = settings.cache(is_context=identity.role is WorkerRole.CONTEXT)
        self.max_request_tokens = geometry.max_request_tokens
        copies = TierCopies(self._spend, settings.page_bytes, settings.tier_bytes_per_s)
        self.manager = making.manager(geometry, cache, identity.epoch, copies)
        window = TransferAdmission(settings.transfer.max_inflight_bytes)
        shape = CacheShape.of(geometry)
        self.scheduler = making.scheduler(settings.scheduler, self.manager, identity.role, shape, window)
        self.transport, self.agent = self._make_agent()
        self._loop = self._make_loop(geometry)
        self._account = self._loop.snapshot()
        network.join(
            identity.name,
            identity.epoch,
            lambda lease, epoch, by: self.agent.settle(lease, epoch, by, self._events.now_s),
        )

    def _make_agent(self) -> tuple[VirtualTransport, TransferAgent]:
        identity, settings = self.identity, self._settings
        random = Random(f"transfers {settings.seed} {identity.name} {identity.epoch}")
        transport = VirtualTransport(self._network, identity.name, identity.epoch, settings.faults, random)
        group = GroupLayout(layer_ids=(0,), window=None, num_sink_tokens=0, page_bytes=settings.page_bytes)
        layout = PoolLayout("simulated", 1, 1, settings.tokens_per_block, "bfloat16", (group,))
        peers = VirtualPeers(self._network, self._poll_soon)
        agent = TransferAgent(
            transport, peers, settings.transfer, layout, identity.name, identity.epoch, wake=self._wake
        )
        return transport, agent

    def _make_loop(self, geometry: CacheGeometry) -> WorkerLoop:
        identity, settings = self.identity, self._settings
        random = Random(f"steps {settings.seed} {identity.name} {identity.epoch}")
        parts = WorkerParts(
            manager=self.manager,
            scheduler=self.scheduler,
            engine=SimulatedEngine(settings.cost, self._spend, random, settings.faults.step_failure_share),
            agent=self.agent,
            batch_builder=BatchBuilder(
                self.manager, [group.layer_group_id for group in geometry.layer_groups], DrawRules((), None)
            ),
            stop_checker=StopChecker((), _no_stop_strings),
            outbox=Outbox(identity.name, identity.epoch, self),
            staging=SharedPool(),
            wake=threading.Event(),
            # The deployment audits after passes, and counts the violations.
            self_audit=SelfAudit(self.manager.audit, period_s=0.0, max_share=1.0, clock=self._now_s),
            prefix_feed=PrefixFeed(self.manager) if settings.router.needs_kv_events else None,
        )
        return WorkerLoop(identity, parts, self._now_s)

    # -- what the deployment does with it --------------------------------------------------------------

    def start(self) -> None:
        """Begin to beat."""
        self._beat()

    def registration(self) -> WorkerRegistration:
        """The first word to the central scheduler."""
        identity = self.identity
        return WorkerRegistration(
            identity.name,
            identity.role,
            identity.epoch,
            identity.pid,
            self.max_request_tokens,
            self._settings.tokens_per_block,
        )

    def post(self, batch: CommandBatch) -> None:
        """Commands arrive."""
        if self.is_alive:
            self._loop.post(batch)
            self._wake()

    def die(self) -> None:
        """The process ends: nothing that it would have said later is said, its memory is gone."""
        self._ends_s = self._events.now_s
        self._network.leave(self.identity.name, self.identity.epoch)
        self.agent.close()

    @property
    def is_alive(self) -> bool:
        """Whether this life goes on."""
        return self._events.now_s < self._ends_s

    @property
    def account(self) -> WorkerSnapshot:
        """What the loop said of itself after its last finished iteration."""
        return self._account

    # -- WorkerSinks: what the loop says at the end of an iteration --------------------------------------

    def send_reports(self, batch: ReportBatch) -> None:
        """To the central scheduler."""
        self._send(lambda: self._receivers.reports(batch))

    def send_heartbeat(self, heartbeat: WorkerHeartbeat) -> None:
        """To the central scheduler."""
        self._send(lambda: self._receivers.heartbeat(heartbeat))

    def send_tokens(self, batch: TokenBatch) -> None:
        """To the door."""
        self._send(lambda: self._receivers.tokens(batch))

    def _send(self, deliver: Callable[[], None]) -> None:
        sent_s = self._clock_s

        def arrive() -> None:
            if sent_s < self._ends_s:
                deliver()

        self._events.at(sent_s + self._network.settings.message_s, arrive)

    # -- the loop ----------------------------------------------------------------------------------------

    def _now_s(self) -> float:
        return self._clock_s

    def _spend(self, seconds: float) -> None:
        self._clock_s += seconds

    def _wake(self) -> None:
        if not self._is_busy:
            self._is_busy = True
            self._events.after(0.0, self._iterate)

    def _iterate(self) -> None:
        """One iteration; the worker is busy until it finds nothing to do."""
        if not self.is_alive:
            return
        self._account = self._loop.snapshot()
        began_s = self._events.now_s
        self._clock_s = began_s + self._settings.cost.pass_s
        if not self._loop.run_once():
            self._clock_s = began_s
            self._is_busy = False
            return
        self._poll_soon()
        self._count(self._clock_s - began_s)
        self._events.at(self._clock_s, self._iterate)

    def _count(self, seconds: float) -> None:
        tally, every = self.tally, self._settings.audit_every
        tally.num_iterations += 1
        tally.busy_s += seconds
        counts = next(iter(self._loop.snapshot().stats.tiers.values()))
        share = counts.in_use / counts.total
        tally.page_share_seconds += share * seconds
        tally.peak_page_share = max(tally.peak_page_share, share)
        if every and tally.num_iterations % every == 0:
            self.manager.audit()
            tally.num_audits += 1

    # -- the agent ---------------------------------------------------------------------------------------

    def _poll_soon(self) -> None:
        self._poll_at(self._events.now_s)

    def _poll_at(self, due_s: float) -> None:
        if due_s < self._poll_due_s:
            self._poll_due_s = due_s
            self._events.at(due_s, lambda: self._poll(due_s))

    def _poll(self, due_s: float) -> None:
        if due_s != self._poll_due_s or not self.is_alive:
            return
        self._poll_due_s = float("inf")
        delay_s = self.agent.poll(self._events.now_s)
        self._poll_at(self._events.now_s + max(delay_s, self._settings.transfer.agent_poll_s))

    def _beat(self) -> None:
        if not self.is_alive:
            return
        account = self._account
        heartbeat = WorkerHeartbeat(
            account.worker, account.epoch, account.iteration, self._loop.longest_step_s, account
        )
        self._events.after(self._network.settings.message_s, lambda: self._receivers.heartbeat(heartbeat))
        self._events.after(self._settings.transfer.heartbeat_s, self._beat)


def _no_stop_strings(stop_strings: object, min_tokens: int) -> StopStringDetector:
    msg = f"simulated requests have no text to find {stop_strings} in"
    raise ValueError(msg)
