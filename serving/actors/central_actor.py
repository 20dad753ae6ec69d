"""`CentralActor`: the central scheduler's process."""

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Sequence
from typing import Any

from configs import DeploymentConfig
from kvtransfer.errors import PeerError
from scheduler.central import CentralScheduler, NotifyDoor, SendToWorker
from scheduler.messages import ReportBatch, SubmitReply, WorkerHeartbeat, WorkerRegistration
from scheduler.spec import DoorName, RequestSpec, RequestUid, Term
from serving.actors.directory import CENTRAL_NAME, ActorPlace, Directory, prepare_process
from serving.actors.report_order import ReportOrder

_log = logging.getLogger("pdserve.central")
_TICK_S = 0.1
_STALL_S = 0.3


class CentralActor:
    """The central scheduler: events in, commands out as actor calls."""

    def __init__(self, place: ActorPlace, config: DeploymentConfig, term: Term) -> None:
        """Start a term."""
        prepare_process(place, CENTRAL_NAME)
        self._central = CentralScheduler(config.central, term)
        self._directory = Directory(place.namespace)
        self._order = ReportOrder()
        self._ticking: asyncio.Task[None] | None = None

    async def start(self) -> int:
        """Begin to tick; returns the process id."""
        self._ticking = self._ticking or asyncio.create_task(self._tick())
        return os.getpid()

    async def register_worker(self, registration: WorkerRegistration) -> None:
        """A worker's first word."""
        self._directory.forget(registration.worker)
        self._central.register_worker(registration, time.monotonic())
        self._send()

    async def reports(self, batch: ReportBatch) -> None:
        """Reports of one iteration."""
        for due in self._order.push(batch):
            self._central.reports(due, time.monotonic())
        self._send()

    async def heartbeat(self, heartbeat: WorkerHeartbeat) -> None:
        """A worker lives."""
        for divergence in self._central.heartbeat(heartbeat, time.monotonic()):
            _log.error("divergence repaired: %s", divergence)
        self._send()

    async def submit(self, door: DoorName, specs: Sequence[RequestSpec]) -> SubmitReply:
        """New requests of a door."""
        reply = self._central.submit(door, specs, time.monotonic())
        self._send()
        return reply

    async def cancel(self, door: DoorName, uids: Sequence[RequestUid]) -> None:
        """A door gives up on requests."""
        self._central.cancel(door, uids, time.monotonic())
        self._send()

    async def state(self) -> dict[str, Any]:
        """For /cluster/state."""
        state = self._central.state(time.monotonic())
        state["central"] = {"pid": os.getpid(), **state["central"]}
        return state

    async def health(self) -> tuple[bool, str]:
        """Whether work can make progress, and why not."""
        return self._central.health()

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
            due_s = now_s + _TICK_S
            await asyncio.sleep(_TICK_S)

    def _send(self) -> None:
        for command in self._central.take_commands():
            with contextlib.suppress(PeerError):
                match command:
                    case SendToWorker(worker=worker, batch=batch):
                        self._directory.find(worker).post.remote(batch)
                    case NotifyDoor(door, notices):
                        self._directory.find(door).on_notices.remote(notices)
