"""Ray shells around the worker, the central scheduler and the door: names, handles, and nothing to decide.

Every method hands over to a plain object. Handles are looked up by name in the deployment's namespace, so
that an actor which came back after a death is found again.
"""

import asyncio
import contextlib
import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from configs import DeploymentConfig
from kvtransfer.errors import PeerError
from kvtransfer.messages import SettleReply
from manager import Epoch, LeaseId, RequestId, WorkerName
from scheduler.central import CentralScheduler, NotifyDoor, SendToWorker
from scheduler.messages import (
    CommandBatch,
    DoorNotice,
    ReportBatch,
    SubmitReply,
    TokenBatch,
    WorkerHeartbeat,
    WorkerRegistration,
    WorkerRole,
)
from scheduler.spec import DoorName, RequestSpec, RequestUid, Term
from serving.api.http_server import DoorServer
from serving.endpoint import EndpointUnavailableError
from serving.workers.assembly import WorkerPlan, build_worker
from serving.workers.step_loop import WorkerIdentity

CENTRAL_NAME = "central"
_log = logging.getLogger("pdserve.actors")
_TICK_S = 0.1
_SWITCH_INTERVAL_S = 0.0005  # the loop and Ray's threads share the interpreter lock; the default is 5 ms


@dataclass(frozen=True, slots=True)
class ActorPlace:
    """What every actor of a deployment must know of its surroundings."""

    namespace: str
    run_folder: Path
    log_level: int = logging.INFO


def _prepare_process(place: ActorPlace, name: str) -> None:
    logging.basicConfig(level=place.log_level, format=f"%(asctime)s {name} %(levelname)s %(name)s: %(message)s")
    sys.setswitchinterval(_SWITCH_INTERVAL_S)


class Directory:
    """Finds actors by name, and remembers them."""

    def __init__(self, namespace: str) -> None:
        """Look in `namespace`."""
        self._namespace = namespace
        self._handles: dict[str, Any] = {}  # Ray's handles have no static type

    def find(self, name: str) -> Any:
        """The actor's handle. Raises PeerError when there is none."""
        handle = self._handles.get(name)
        if handle is None:
            try:
                handle = ray.get_actor(name, namespace=self._namespace)
            except ValueError as error:
                msg = f"no actor named {name!r}: {error}"
                raise PeerError(msg) from error
            self._handles[name] = handle
        return handle

    def forget(self, name: str) -> None:
        """Look it up again next time."""
        self._handles.pop(name, None)


class RaySinks:
    """A worker's messages as actor calls whose results nobody waits for."""

    def __init__(self, directory: Directory) -> None:
        """Use this directory."""
        self._directory = directory

    def send_reports(self, batch: ReportBatch) -> None:
        """To the central scheduler."""
        with contextlib.suppress(PeerError):
            self._directory.find(CENTRAL_NAME).reports.remote(batch)

    def send_heartbeat(self, heartbeat: WorkerHeartbeat) -> None:
        """To the central scheduler."""
        with contextlib.suppress(PeerError):
            self._directory.find(CENTRAL_NAME).heartbeat.remote(heartbeat)

    def send_tokens(self, batch: TokenBatch) -> None:
        """To the door."""
        with contextlib.suppress(PeerError):
            self._directory.find(batch.door).on_tokens.remote(batch)


class RayReply:
    """A settle that is under way."""

    def __init__(self, reference: Any) -> None:
        """Wait for `reference`."""
        self._reference = reference

    def result(self) -> SettleReply | None:
        """The answer if it is there. Raises PeerError when the peer is gone."""
        ready, _ = ray.wait([self._reference], timeout=0)
        if not ready:
            return None
        try:
            return SettleReply(ray.get(ready[0]))
        except ray.exceptions.RayError as error:
            msg = f"settle was not answered: {type(error).__name__}"
            raise PeerError(msg) from error


class RayPeers:
    """The peer channel between workers."""

    def __init__(self, directory: Directory) -> None:
        """Use this directory."""
        self._directory = directory

    def settle(self, owner: WorkerName, lease_id: LeaseId, epoch: Epoch, reader: RequestId) -> RayReply:
        """Ask the owner of a lease."""
        return RayReply(self._directory.find(owner).settle.remote(lease_id, epoch, reader))


class WorkerActor:
    """One worker process; Ray restarts it after a death, with a new epoch."""

    def __init__(self, place: ActorPlace, plan: WorkerPlan, name: str, role: WorkerRole) -> None:
        """Load the model and register."""
        _prepare_process(place, name)
        directory = Directory(place.namespace)
        identity = WorkerIdentity(WorkerName(name), role, Epoch(time.time_ns()), os.getpid())
        self._worker = build_worker(identity, plan, RayPeers(directory), RaySinks(directory))
        self._registration = self._worker.registration()
        self._worker.start(on_fatal=lambda: os._exit(70))
        directory.find(CENTRAL_NAME).register_worker.remote(self._registration)

    def registration(self) -> WorkerRegistration:
        """Answered once the worker runs."""
        return self._registration

    def post(self, batch: CommandBatch) -> None:
        """Commands of the central scheduler."""
        self._worker.post(batch)

    def settle(self, lease_id: LeaseId, epoch: Epoch, reader: RequestId) -> SettleReply:
        """A peer has read a lease."""
        return self._worker.agent.settle(lease_id, epoch, reader, time.monotonic())

    def stop(self) -> None:
        """End the threads, release the memory."""
        self._worker.stop()


class CentralActor:
    """The central scheduler: events in, commands out as actor calls."""

    def __init__(self, place: ActorPlace, config: DeploymentConfig, term: Term) -> None:
        """Start a term."""
        _prepare_process(place, CENTRAL_NAME)
        self._central = CentralScheduler(config.central, term)
        self._directory = Directory(place.namespace)
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
        self._central.reports(batch, time.monotonic())
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
        while True:
            await asyncio.sleep(_TICK_S)
            self._central.tick(time.monotonic())
            self._send()

    def _send(self) -> None:
        for command in self._central.take_commands():
            with contextlib.suppress(PeerError):
                match command:
                    case SendToWorker(worker=worker, batch=batch):
                        self._directory.find(worker).post.remote(batch)
                    case NotifyDoor(door, notices):
                        self._directory.find(door).on_notices.remote(notices)


class RayEndpoint:
    """A door's way to the central scheduler. Every call raises EndpointUnavailableError when it is gone."""

    def __init__(self, directory: Directory, door: DoorName) -> None:
        """Speak as `door`."""
        self._directory = directory
        self._door = door

    async def submit(self, specs: Sequence[RequestSpec]) -> SubmitReply:
        """Queue requests."""
        reply: SubmitReply = await self._ask(lambda central: central.submit.remote(self._door, specs))
        return reply

    async def cancel(self, uids: Sequence[RequestUid]) -> None:
        """Give requests up."""
        await self._ask(lambda central: central.cancel.remote(self._door, uids))

    async def cluster_state(self) -> dict[str, Any]:
        """For /cluster/state."""
        state: dict[str, Any] = await self._ask(lambda central: central.state.remote())
        return state

    async def health(self) -> tuple[bool, str]:
        """Whether work can make progress."""
        healthy: tuple[bool, str] = await self._ask(lambda central: central.health.remote())
        return healthy

    async def _ask(self, call: Callable[[Any], Any]) -> Any:
        try:
            return await call(self._directory.find(CENTRAL_NAME))
        except (PeerError, ray.exceptions.RayError) as error:
            self._directory.forget(CENTRAL_NAME)
            msg = f"the central scheduler cannot be reached: {type(error).__name__}"
            raise EndpointUnavailableError(msg) from error


class DoorActor:
    """One front door: an HTTP server inside an actor."""

    def __init__(self, place: ActorPlace, config: DeploymentConfig, model_folder: Path, name: str) -> None:
        """Wait for `start`."""
        _prepare_process(place, name)
        self._name = DoorName(name)
        self._endpoint = RayEndpoint(Directory(place.namespace), self._name)
        self._config = config
        self._model_folder = model_folder
        self._server: DoorServer | None = None

    async def start(self, max_request_tokens: int) -> int:
        """Load the tokenizer and listen; returns the port. Raises OSError when it is taken."""
        self._server = DoorServer(self._endpoint, self._config, self._model_folder, self._name, max_request_tokens)
        return await self._server.start()

    async def on_tokens(self, batch: TokenBatch) -> None:
        """Tokens of one step, straight from a worker."""
        if self._server is not None:
            self._server.frontend.on_tokens(batch)

    async def on_notices(self, notices: tuple[DoorNotice, ...]) -> None:
        """What the central scheduler has to say of requests."""
        if self._server is not None:
            self._server.frontend.on_notices(notices)

    async def stop(self) -> None:
        """Stop listening and end open streams."""
        if self._server is not None:
            await self._server.stop()

    async def ping(self) -> int:
        """Lives; returns the process id."""
        return os.getpid()
