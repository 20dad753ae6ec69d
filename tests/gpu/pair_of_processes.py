"""A disaggregated pair without Ray: a context worker in a process of its own, a generation worker here."""

import os
import time
from collections.abc import Sequence
from pathlib import Path

from configs import DeploymentConfig
from manager import Epoch, WorkerName
from scheduler.central import CentralScheduler, NotifyDoor, SendToWorker
from scheduler.messages import CommandBatch, ReportBatch, TokenBatch, WorkerHeartbeat, WorkerRole
from scheduler.spec import DoorName, RequestSpec, Term
from serving.workers.assembly import build_worker
from serving.workers.worker_plan import WorkerIdentity, WorkerPlan
from tests.gpu.worker_process import RemoteContextWorker

DOOR = DoorName("check")
_GENERATION_NAME = WorkerName("generation-0")
_LIMIT_S = 240.0


class _Sinks:
    """The generation worker's messages, as plain calls."""

    def __init__(self, pair: "PairOfProcesses") -> None:
        self._pair = pair

    def send_reports(self, batch: ReportBatch) -> None:
        self._pair.take(batch)

    def send_heartbeat(self, heartbeat: WorkerHeartbeat) -> None:
        self._pair.take(heartbeat)

    def send_tokens(self, batch: TokenBatch) -> None:
        self._pair.take(batch)


class PairOfProcesses:
    """The real central scheduler over both workers; `run` gives each request's tokens."""

    def __init__(self, config: DeploymentConfig, model_folder: Path, pool_folder: Path) -> None:
        """Start both."""
        self._central = CentralScheduler(config.central, Term(1), config.router)
        self._tokens: dict[str, list[int]] = {}
        self._open: set[str] = set()
        plan = WorkerPlan(config, model_folder, pool_folder, num_threads=1)
        self._remote = RemoteContextWorker(plan)
        identity = WorkerIdentity(_GENERATION_NAME, WorkerRole.GENERATION, Epoch(1), os.getpid())
        self._local = build_worker(identity, plan, self._remote, _Sinks(self))
        for registration in (self._remote.registration, self._local.registration()):
            self._central.register_worker(registration, time.monotonic())

    def run(self, specs: Sequence[RequestSpec]) -> list[list[int]]:
        """Submit all at once; returns their tokens in order."""
        self._tokens |= {spec.uid: [] for spec in specs}
        self._open = {spec.uid for spec in specs}
        assert self._central.submit(DOOR, specs, time.monotonic()).refused == ()
        deadline_s = time.monotonic() + _LIMIT_S
        while self._open:
            self._turn()
            assert time.monotonic() < deadline_s, self._central.state(time.monotonic())
        return [self._tokens[spec.uid] for spec in specs]

    def transferred_bytes(self) -> int:
        """Bytes that went from one process to the other."""
        return self._local.agent.counters()["bytes_received"]

    def close(self) -> None:
        """Audit both managers and end both workers."""
        self._local.manager.audit()
        self._remote.stop()
        self._local.stop()

    def take(self, message: object) -> None:
        """A worker's message."""
        now_s = time.monotonic()
        match message:
            case ReportBatch():
                self._central.reports(message, now_s)
            case WorkerHeartbeat():
                self._central.heartbeat(message, now_s)
            case TokenBatch():
                for event in message.events:
                    assert event.position == len(self._tokens[event.uid])
                    self._tokens[event.uid].append(event.token_id)
                    if event.finish_reason is not None:
                        self._open.discard(event.uid)

    def _turn(self) -> None:
        for message in self._remote.take():
            self.take(message)
        busy = self._local.run_once()
        self._central.tick(time.monotonic())
        for command in self._central.take_commands():
            match command:
                case SendToWorker(worker=worker, batch=batch):
                    self._post(worker, batch)
                case NotifyDoor(_, notices):
                    raise AssertionError(notices)
        if not busy:
            time.sleep(0.001)

    def _post(self, worker: WorkerName, batch: CommandBatch) -> None:
        target = self._local if worker == _GENERATION_NAME else self._remote
        target.post(batch)
