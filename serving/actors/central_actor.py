"""`CentralActor`: the central scheduler's process."""

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray

from configs import DeploymentConfig
from kvtransfer.errors import PeerError
from manager import Epoch, LogicError, WorkerName
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
_REACH_AGAIN_S = 0.05
_EXIT_SUPERSEDED = 71
_EXIT_AUDIT = 72


class NotLeadingError(Exception):
    """This one stands by; another one has the term, or the next look begins one here."""


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
    """The central scheduler: events in, commands out as actor calls. Ray restarts it after a death.

    It stands by until its first look, which begins its term. Until then it hears nothing: its term asks everybody what
    they hold and own.
    """

    def __init__(self, place: ActorPlace, name: str, config: DeploymentConfig, doors: Sequence[str]) -> None:
        """Stand by.

        Args:
            place: of the deployment.
            name: of this actor.
            config: of the deployment.
            doors: names of the door actors.
        """
        prepare_process(place, CENTRAL_NAME)
        self._name = name
        self._config = config
        self._central: CentralScheduler | None = None
        self._workers = [WorkerName(name) for name, _ in worker_names(config.cluster)]
        self._doors = [DoorName(name) for name in doors]
        self._directory = Directory(place.namespace)
        self._order = ReportOrder()
        self._lives = LifeEvents()
        self._has_begun = asyncio.Event()
        self._ticking: asyncio.Task[None] | None = None

    async def stand_by(self) -> int:
        """For the supervisor: the pid of one that is ready to begin a term. One that has a term has lost it."""
        if self._central is not None:
            _log.critical("term %d is over: another one has taken over", self._central.term)
            os._exit(_EXIT_SUPERSEDED)
        for name in (*self._workers, *self._doors):  # to look an actor up takes a moment, which a term does not have
            with contextlib.suppress(PeerError):
                self._directory.find(name)
        return os.getpid()

    async def look(
        self, running: Sequence[tuple[WorkerName, int]] = (), gone: Sequence[WorkerName] = ()
    ) -> CentralLook:
        """For the supervisor; the first look of a life starts its term.

        Args:
            running: worker processes that the supervisor sees run.
            gone: workers whose processes it has seen die, and that have no new one yet: a term does not wait for them.
        """
        central = self._begin(gone) if self._central is None else self._central
        for name, pid in running:
            central.process_seen(name, pid, time.monotonic())
        workers = central.state(time.monotonic())["workers"]
        lost = tuple((w["name"], w["pid"], w["lost_reason"]) for w in workers if w["state"] == "lost")
        for loss in lost:
            self._lives.note_loss(*loss)
        living = tuple((worker["name"], worker["pid"]) for worker in workers if worker["state"] != "lost")
        return CentralLook(os.getpid(), living, lost)

    def _begin(self, gone: Sequence[WorkerName]) -> CentralScheduler:
        # Above every earlier term as long as nobody steps the clock; where somebody did, workers tell (C6).
        central = CentralScheduler(self._config.central, Term(time.time_ns()), self._config.router)
        central.take_over(self._workers, self._doors, time.monotonic(), gone)
        self._central = central
        self._ticking = asyncio.create_task(self._tick(central))
        self._lives.note(CENTRAL_NAME, f"term {central.term} begins")
        self._has_begun.set()
        self._send()
        return central

    def _leading(self) -> CentralScheduler:
        if self._central is None:
            msg = f"{self._name} stands by and has no term"
            raise NotLeadingError(msg)
        return self._central

    async def _begun(self) -> CentralScheduler:
        """What the supervisor says may overtake the look that begins the term."""
        await self._has_begun.wait()
        return self._leading()

    # -- workers -----------------------------------------------------------------------------------

    async def register_worker(self, registration: WorkerRegistration) -> None:
        """A worker's first word."""
        if (central := self._central) is None:
            return
        self._directory.forget(registration.worker)
        self._lives.note(registration.worker, f"started (pid {registration.pid})")
        if await self._reaches(registration, central.term):
            central.register_worker(registration, time.monotonic())
            self._send()

    async def _reaches(self, registration: WorkerRegistration, term: Term) -> bool:
        """Whether this life can be called. Ray loses calls to one whose start is not known everywhere yet."""
        give_up_at_s = time.monotonic() + self._config.central.door_deadline_s
        while time.monotonic() < give_up_at_s:
            with contextlib.suppress(PeerError, ray.exceptions.RayError):
                epoch: Epoch = await self._directory.find(registration.worker).follow_central.remote(self._name, term)
                return epoch == registration.epoch
            self._directory.forget(registration.worker)
            await asyncio.sleep(_REACH_AGAIN_S)
        _log.error("%s has registered and cannot be reached", registration.worker)
        return False

    async def introduce(self, introduction: WorkerIntroduction) -> None:
        """A worker's answer to being asked."""
        if (central := self._central) is None:
            return
        registration = introduction.registration
        early = self._order.begin(registration.worker, registration.epoch, introduction.reports_sent)
        central.introduce(introduction, time.monotonic())
        if central.is_superseded:
            _log.critical("term %d is not the highest: %s knows a higher one", central.term, registration.worker)
            os._exit(_EXIT_SUPERSEDED)
        self._be_followed_by(registration.worker)
        for due in early:
            central.reports(due, time.monotonic())
        self._send()

    async def reports(self, batch: ReportBatch) -> None:
        """Reports of one iteration."""
        if (central := self._central) is None:
            return
        for due in self._order.push(batch):
            central.reports(due, time.monotonic())
        self._send()

    async def heartbeat(self, heartbeat: WorkerHeartbeat, followed: Term) -> None:
        """A worker lives, and sends its reports to the central scheduler of the `followed` term."""
        if (central := self._central) is None:
            return
        if followed < central.term and central.is_registered(heartbeat.worker, heartbeat.epoch):
            self._be_followed_by(heartbeat.worker)
        for divergence in central.heartbeat(heartbeat, time.monotonic()):
            _log.error("divergence repaired: %s", divergence)
        self._send()

    async def worker_gone(self, name: WorkerName, pid: int, reason: str) -> None:
        """The supervisor has seen a worker's process die or stand still."""
        self._lives.note_loss(name, pid, reason)
        central = await self._begun()
        central.process_lost(name, pid, reason, time.monotonic())
        self._send()

    # -- doors -------------------------------------------------------------------------------------

    async def submit(self, door: DoorName, specs: Sequence[RequestSpec]) -> SubmitReply:
        """New requests of a door."""
        reply = self._leading().submit(door, specs, time.monotonic())
        self._send()
        return reply

    async def cancel(self, door: DoorName, uids: Sequence[RequestUid]) -> None:
        """A door gives up on requests."""
        self._leading().cancel(door, uids, time.monotonic())
        self._send()

    async def claim(self, door: DoorName, specs: Sequence[RequestSpec]) -> None:
        """A door's answer to being asked: its open requests."""
        if (central := self._central) is None:
            return
        central.claim(door, specs, time.monotonic())
        self._be_followed_by(door)
        self._send()

    async def door_heartbeat(self, door: DoorName) -> None:
        """A door lives. One that is not known must say what it owns."""
        if (central := self._central) is None:
            return
        if not central.knows_door(door):
            self._call(AskDoor(door, central.term))
        central.door_heartbeat(door, time.monotonic())

    async def door_gone(self, door: DoorName) -> None:
        """The supervisor has seen a door's process die."""
        self._lives.note_loss(place_of(door), door, "its process is gone")
        central = await self._begun()
        central.door_lost(door, time.monotonic())
        self._send()

    async def state(self) -> dict[str, Any]:
        """For /cluster/state."""
        state = self._leading().state(time.monotonic())
        state["central"] = {"pid": os.getpid(), **state["central"]}
        return state

    async def history(self, seconds: float) -> WorkerHistory:
        """For `pdserve trace export`."""
        return WorkerHistory(CENTRAL_NAME, None, os.getpid(), self._leading().term, events=self._lives.tell(seconds))

    async def health(self) -> tuple[bool, str]:
        """Whether work can make progress, and why not."""
        return self._leading().health()

    # -- time, and what goes out -------------------------------------------------------------------

    async def _tick(self, central: CentralScheduler) -> None:
        due_s = time.monotonic()
        while True:
            now_s = time.monotonic()
            if now_s - due_s > _STALL_S:
                # We were late, not the workers: their heartbeats wait behind this very tick.
                _log.warning("the central scheduler stalled for %.1f s", now_s - due_s)
                central.excuse_silence(now_s - due_s)
            central.tick(now_s)
            self._send()
            self._audit(central)
            due_s = now_s + _TICK_S
            await asyncio.sleep(_TICK_S)

    def _audit(self, central: CentralScheduler) -> None:
        """A drifted ledger is not carried on with: the next term asks everyone again (M6, C6)."""
        try:
            central.audit()
        except LogicError:
            _log.critical("the ledger is wrong; ending term %d", central.term, exc_info=True)
            os._exit(_EXIT_AUDIT)

    def _be_followed_by(self, name: str) -> None:
        """Tell a worker or a door where its messages go from now on; this term may have been raised by its answer."""
        with contextlib.suppress(PeerError):
            self._directory.find(name).follow_central.remote(self._name, self._leading().term)

    def _send(self) -> None:
        for command in self._leading().take_commands():
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
                    find(worker).introduce.remote(self._name, term)
                case AskDoor(door, term):
                    find(door).introduce.remote(self._name, term)
