"""A whole deployment in one process, without Ray: for tests, the demo and devices without a cluster.

The central scheduler and the workers are the real ones; only the messages are plain calls. `pump` runs
one turn of everything, so a test decides when things happen.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from configs import DeploymentConfig
from kvtransfer.agent import TransferAgent
from kvtransfer.messages import ReaderId, SettleReply
from manager import Epoch, LeaseId, WorkerName
from scheduler.central import AskWorker, CentralScheduler, NotifyDoor, SendToWorker
from scheduler.introductions import WorkerIntroduction
from scheduler.messages import DoorNotice, ReportBatch, SubmitReply, TokenBatch, WorkerHeartbeat
from scheduler.spec import DoorName, RequestSpec, RequestUid, Term
from serving.workers.assembly import build_worker
from serving.workers.worker import Worker
from serving.workers.worker_plan import WorkerIdentity, WorkerPlan, worker_names

_NEVER_SILENT = 1_000_000


class InprocessSinks:
    """A worker's sinks: plain calls into the cluster that owns them."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """Unbound; the cluster binds itself before the first message."""
        self._clock = clock
        self._central: CentralScheduler | None = None
        self._on_tokens: Callable[[TokenBatch], None] | None = None

    def bind(self, central: CentralScheduler, on_tokens: Callable[[TokenBatch], None]) -> None:
        """Say where messages go."""
        self._central = central
        self._on_tokens = on_tokens

    def send_reports(self, batch: ReportBatch) -> None:
        """To the central scheduler."""
        if self._central is not None:
            self._central.reports(batch, self._clock())

    def send_heartbeat(self, heartbeat: WorkerHeartbeat) -> None:
        """To the central scheduler."""
        if self._central is not None:
            self._central.heartbeat(heartbeat, self._clock())

    def send_tokens(self, batch: TokenBatch) -> None:
        """To the door."""
        if self._on_tokens is not None:
            self._on_tokens(batch)


class ReadyReply:
    """An answer that is there already."""

    def __init__(self, reply: SettleReply) -> None:
        """Hold `reply`."""
        self._reply = reply

    def result(self) -> SettleReply | None:
        """The answer."""
        return self._reply


class InprocessPeers:
    """The peer channel between agents of one process."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """Empty; add every agent before the first transfer."""
        self._clock = clock
        self._agents: dict[WorkerName, TransferAgent] = {}

    def add(self, worker: WorkerName, agent: TransferAgent) -> None:
        """Make an agent reachable."""
        self._agents[worker] = agent

    def settle(self, owner: WorkerName, lease_id: LeaseId, epoch: Epoch, reader: ReaderId) -> ReadyReply:
        """Ask the owner, which answers at once."""
        return ReadyReply(self._agents[owner].settle(lease_id, epoch, reader, self._clock()))


class InprocessCluster:
    """Central scheduler, workers and one door's callbacks; driven by `pump`."""

    def __init__(
        self,
        config: DeploymentConfig,
        workers: Mapping[WorkerName, Worker],
        sinks: InprocessSinks,
        clock: Callable[[], float],
    ) -> None:
        """Register every worker with a central scheduler of its own."""
        # One thread cannot beat while it computes, and a worker that is gone takes its observer with it.
        self._config = replace(config.central, missed_heartbeats=_NEVER_SILENT)
        self._router = config.router
        self.central = central = CentralScheduler(self._config, Term(1), self._router)
        self.workers = dict(workers)
        self._clock = clock
        self._sinks = sinks
        self._tokens: list[TokenBatch] = []
        self._notices: list[DoorNotice] = []
        sinks.bind(central, self._tokens.append)
        for worker in self.workers.values():
            central.register_worker(worker.registration(), clock())

    def submit(self, door: DoorName, specs: Sequence[RequestSpec]) -> SubmitReply:
        """Queue requests."""
        return self.central.submit(door, specs, self._clock())

    def cancel(self, door: DoorName, uids: Sequence[RequestUid]) -> None:
        """Cancel requests everywhere."""
        self.central.cancel(door, uids, self._clock())

    def replace_central(self, claims: Mapping[DoorName, Sequence[RequestSpec]]) -> None:
        """The central scheduler is gone, with all that it knew; its successor asks the workers.

        Args:
            claims: what each door owns.
        """
        term = Term(self.central.term + 1)
        self.central = CentralScheduler(self._config, term, self._router)
        self._sinks.bind(self.central, self._tokens.append)
        self.central.take_over(list(self.workers), list(claims), self._clock())
        for door, specs in claims.items():
            self.central.claim(door, specs, self._clock())

    def pump(self) -> bool:
        """Deliver commands, run one iteration of every worker; returns whether anything happened."""
        self.central.tick(self._clock())
        busy = self.deliver()
        for worker in self.workers.values():
            busy = worker.run_once() or busy
        return self.deliver() or busy

    def take_tokens(self) -> list[TokenBatch]:
        """Token batches since the last call."""
        taken, self._tokens[:] = list(self._tokens), []
        return taken

    def take_notices(self) -> list[DoorNotice]:
        """Notices to the door since the last call."""
        taken, self._notices = self._notices, []
        return taken

    def close(self) -> None:
        """Stop every worker; may be called twice."""
        for worker in self.workers.values():
            worker.stop()

    def _introduce(self, introduction: WorkerIntroduction) -> None:
        self.central.introduce(introduction, self._clock())

    def deliver(self) -> bool:
        """Bring the central scheduler's commands to their receivers; returns whether there were any."""
        commands = self.central.take_commands()
        for command in commands:
            match command:
                case SendToWorker(worker=worker, batch=batch):
                    self.workers[worker].post(batch)
                case NotifyDoor(notices=notices):
                    self._notices.extend(notices)
                case AskWorker(worker=worker, term=term):
                    self.workers[worker].introduce(term, self._introduce)
        return bool(commands)


def build_cluster(
    config: DeploymentConfig,
    model_folder: Path,
    pool_folder: Path,
    clock: Callable[[], float] = time.monotonic,
    config_of: Mapping[str, DeploymentConfig] = MappingProxyType({}),
) -> InprocessCluster:
    """Build every worker that `config` asks for, each with one thread, and connect them.

    Args:
        config: of the deployment; its Ray and HTTP sections are not used.
        model_folder: a Hugging Face folder.
        pool_folder: where pool files are made.
        clock: monotonic seconds.
        config_of: for workers, by name, that are built from a configuration of their own.
    """
    sinks, peers = InprocessSinks(clock), InprocessPeers(clock)
    workers = {}
    for epoch, (name, role) in enumerate(worker_names(config.cluster), start=1):
        identity = WorkerIdentity(WorkerName(name), role, Epoch(epoch), os.getpid())
        plan = WorkerPlan(config_of.get(name, config), model_folder, pool_folder, num_threads=1)
        worker = build_worker(identity, plan, peers, sinks, clock)
        peers.add(identity.name, worker.agent)
        workers[identity.name] = worker
    return InprocessCluster(config, workers, sinks, clock)
