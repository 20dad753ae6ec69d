"""`CentralActor`: the central scheduler's process."""

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from configs import DeploymentConfig
from kvtransfer.errors import PeerError
from manager import LogicError, WorkerName
from scheduler.central import AskDoor, AskWorker, CentralCommand, CentralScheduler, NotifyDoor, SendToWorker
from scheduler.introductions import WorkerIntroduction
from scheduler.messages import ReportBatch, SubmitReply, WorkerHeartbeat, WorkerRegistration
from scheduler.spec import DoorName, RequestSpec, RequestUid, Term
from serving.actors.directory import CENTRAL_NAME, ActorPlace, Directory, prepare_process
from serving.actors.life_events import LifeEvents
from serving.actors.report_order import ReportOrder
from serving.door_peers import place_of
from serving.tracing.history import WorkerHistory
from serving.workers.worker_plan import worker_names

_log = logging.getLogger("pdserve.central")
_TICK_S = 0.1
_STALL_S = 0.3
_EXIT_SUPERSEDED = 71
_EXIT_AUDIT = 72


@dataclass(frozen=True, slots=True)
class CentralLook:
    """What the supervisor sees of it.

    Attributes:
        workers: pid of every worker that lives.
        lost: of the others: (name, pid, reason), to be ended.
    """

    pid: int
    workers: tuple[tuple[str, int], ...]
    lost: tuple[tuple[str, int, str], ...]


class CentralActor:
    """The central scheduler: events in, commands out as actor calls. Ray restarts it after a death, as a new term."""

    def __init__(self, place: ActorPlace, config: DeploymentConfig, doors: Sequence[str]) -> None:
        """Begin a term.

        Args:
            place: of the deployment.
            config: of the deployment.
            doors: names of the door actors.
        """
        prepare_process(place, CENTRAL_NAME)
        # Above every earlier term as long as nobody steps the clock; where somebody did, workers tell (C6).
        self._central = CentralScheduler(config.central, Term(time.time_ns()), config.router)
        self._workers = [WorkerName(name) for name, _ in worker_names(config.cluster)]
        self._doors = [DoorName(name) for name in doors]
        self._directory = Directory(place.namespace)
        self._order = ReportOrder()
        self._lives = LifeEvents()
        # What comes before the first look would be judged by a term that knows nobody.
        self._has_begun = asyncio.Event()
        self._ticking: asyncio.Task[None] | None = None

    async def look(self, running: Sequence[tuple[WorkerName, int]] = ()) -> CentralLook:
        """For the supervisor; the first look of a life starts its term.

        Args:
            running: worker processes that the supervisor sees run.
        """
        for name, pid in running:
            self._central.process_seen(name, pid, time.monotonic())
        if self._ticking is None:
            self._central.take_over(self._workers, self._doors, time.monotonic())
            self._ticking = asyncio.create_task(self._tick())
            self._lives.note(CENTRAL_NAME, f"term {self._central.term} begins")
            self._has_begun.set()
        workers = self._central.state(time.monotonic())["workers"]
        lost = tuple((w["name"], w["pid"], w["lost_reason"]) for w in workers if w["state"] == "lost")
        for loss in lost:
            self._lives.note_loss(*loss)
        living = tuple((worker["name"], worker["pid"]) for worker in workers if worker["state"] != "lost")
        return CentralLook(os.getpid(), living, lost)

    # -- workers -----------------------------------------------------------------------------------

    async def register_worker(self, registration: WorkerRegistration) -> None:
        """A worker's first word."""
        await self._has_begun.wait()
        self._directory.forget(registration.worker)
        self._lives.note(registration.worker, f"started (pid {registration.pid})")
        self._central.register_worker(registration, time.monotonic())
        self._send()

    async def introduce(self, introduction: WorkerIntroduction) -> None:
        """A worker's answer to being asked."""
        await self._has_begun.wait()
        registration = introduction.registration
        early = self._order.begin(registration.worker, registration.epoch, introduction.reports_sent)
        self._central.introduce(introduction, time.monotonic())
        if self._central.is_superseded:
            _log.critical("term %d is not the highest: %s knows a higher one", self._central.term, registration.worker)
            os._exit(_EXIT_SUPERSEDED)
        for due in early:
            self._central.reports(due, time.monotonic())
        self._send()

    async def reports(self, batch: ReportBatch) -> None:
        """Reports of one iteration."""
        await self._has_begun.wait()
        for due in self._order.push(batch):
            self._central.reports(due, time.monotonic())
        self._send()

    async def heartbeat(self, heartbeat: WorkerHeartbeat) -> None:
        """A worker lives."""
        await self._has_begun.wait()
        for divergence in self._central.heartbeat(heartbeat, time.monotonic()):
            _log.error("divergence repaired: %s", divergence)
        self._send()

    async def worker_gone(self, name: WorkerName, pid: int, reason: str) -> None:
        """The supervisor has seen a worker's process die or stand still."""
        self._lives.note_loss(name, pid, reason)
        await self._has_begun.wait()
        self._central.process_lost(name, pid, reason, time.monotonic())
        self._send()

    # -- doors -------------------------------------------------------------------------------------

    async def submit(self, door: DoorName, specs: Sequence[RequestSpec]) -> SubmitReply:
        """New requests of a door."""
        await self._has_begun.wait()
        reply = self._central.submit(door, specs, time.monotonic())
        self._send()
        return reply

    async def cancel(self, door: DoorName, uids: Sequence[RequestUid]) -> None:
        """A door gives up on requests."""
        await self._has_begun.wait()
        self._central.cancel(door, uids, time.monotonic())
        self._send()

    async def claim(self, door: DoorName, specs: Sequence[RequestSpec]) -> None:
        """A door's answer to being asked: its open requests."""
        await self._has_begun.wait()
        self._central.claim(door, specs, time.monotonic())
        self._send()

    async def door_heartbeat(self, door: DoorName) -> None:
        """A door lives. One that is not known must say what it owns."""
        await self._has_begun.wait()
        if not self._central.knows_door(door):
            self._call(AskDoor(door, self._central.term))
        self._central.door_heartbeat(door, time.monotonic())

    async def door_gone(self, door: DoorName) -> None:
        """The supervisor has seen a door's process die."""
        self._lives.note_loss(place_of(door), door, "its process is gone")
        await self._has_begun.wait()
        self._central.door_lost(door, time.monotonic())
        self._send()

    async def state(self) -> dict[str, Any]:
        """For /cluster/state."""
        state = self._central.state(time.monotonic())
        state["central"] = {"pid": os.getpid(), **state["central"]}
        return state

    async def history(self, seconds: float) -> WorkerHistory:
        """For `pdserve trace export`."""
        return WorkerHistory(CENTRAL_NAME, None, os.getpid(), self._central.term, events=self._lives.tell(seconds))

    async def health(self) -> tuple[bool, str]:
        """Whether work can make progress, and why not."""
        return self._central.health()

    # -- time, and what goes out -------------------------------------------------------------------

    async def _tick(self) -> None:
        due_s = time.monotonic()
        while True:
            now_s = time.monotonic()
            if now_s - due_s > _STALL_S:
                # We were late, not the workers: their heartbeats wait behind this very tick.
                _log.warning("the central scheduler stalled for %.1f s", now_s - due_s)
                self._central.excuse_silence(now_s - due_s)
            self._central.tick(now_s)
            self._send()
            self._audit()
            due_s = now_s + _TICK_S
            await asyncio.sleep(_TICK_S)

    def _audit(self) -> None:
        """A drifted ledger is not carried on with: the next term asks everyone again (M6, C6)."""
        try:
            self._central.audit()
        except LogicError:
            _log.critical("the ledger is wrong; ending term %d", self._central.term, exc_info=True)
            os._exit(_EXIT_AUDIT)

    def _send(self) -> None:
        for command in self._central.take_commands():
            self._call(command)

    def _call(self, command: CentralCommand) -> None:
        find = self._directory.find
        with contextlib.suppress(PeerError):
            match command:
                case SendToWorker(worker=worker, batch=batch, epoch=epoch):
                    find(worker).post.remote(epoch, batch)
                case NotifyDoor(door, notices, term):
                    find(door).on_notices.remote(term, notices)
                case AskWorker(worker, term):
                    find(worker).introduce.remote(term)
                case AskDoor(door, term):
                    find(door).introduce.remote(term)
