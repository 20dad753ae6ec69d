"""`DoorActor`: one front door's process, and its way to the central scheduler."""

import asyncio
import contextlib
import os
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray

from configs import DeploymentConfig
from kvtransfer.errors import PeerError
from scheduler.messages import DoorNotice, SubmitReply, TokenBatch
from scheduler.spec import DoorName, RequestSpec, RequestUid, Term
from serving.actors.directory import CENTRAL_NAME, ActorPlace, Directory, prepare_process
from serving.actors.door_peers import RayDoorPeers
from serving.api.http_server import DoorServer
from serving.door_peers import LIFE_MARK, DoorAccount
from serving.endpoint import EndpointUnavailableError
from serving.workers.worker_plan import worker_names


class RayEndpoint:
    """A door's way to the central scheduler. Every call raises EndpointUnavailableError when it is gone."""

    def __init__(self, directory: Directory, door: DoorName) -> None:
        """Speak as `door`."""
        self._directory = directory
        self._door = door
        self._has_moved = asyncio.Event()

    def follow_central(self, actor: str, term: Term) -> None:
        """This one has the term. What an earlier one was asked, it need not be waited for any more."""
        if self._directory.follow_central(actor, term):
            self._has_moved.set()
            self._has_moved = asyncio.Event()

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
            return await _first(call(self._directory.find(CENTRAL_NAME)), self._has_moved)
        except (PeerError, ray.exceptions.RayError) as error:
            self._directory.forget(CENTRAL_NAME)
            msg = f"the central scheduler cannot be reached: {type(error).__name__}"
            raise EndpointUnavailableError(msg) from error


async def _first(answer: Awaitable[Any], has_moved: asyncio.Event) -> Any:
    """The answer. Raises EndpointUnavailableError once another central scheduler has the term: ask that one."""
    answering, moving = asyncio.ensure_future(answer), asyncio.ensure_future(has_moved.wait())
    try:
        await asyncio.wait({answering, moving}, return_when=asyncio.FIRST_COMPLETED)
        if answering.done():
            return answering.result()
        answering.add_done_callback(lambda late: late.cancelled() or late.exception())  # nobody waits for it
        msg = "another central scheduler has taken over"
        raise EndpointUnavailableError(msg)
    finally:
        moving.cancel()


@dataclass(frozen=True, slots=True)
class DoorLook:
    """What the supervisor sees of a door.

    Attributes:
        name: of this life.
        port: where it listens; None before it was started.
    """

    pid: int
    name: DoorName
    port: int | None


class DoorActor:
    """One front door: an HTTP server inside an actor. Ray restarts it after a death; its streams have ended then."""

    def __init__(
        self, place: ActorPlace, config: DeploymentConfig, model_folder: Path, name: str, others: Sequence[str]
    ) -> None:
        """Wait for `start`; `others` are the names of the deployment's other doors."""
        prepare_process(place, name)
        # Each life has a name of its own: the requests of an earlier one have no owner any more.
        self._name = DoorName(f"{name}{LIFE_MARK}{time.time_ns()}")
        self._directory = Directory(place.namespace)
        self._endpoint = RayEndpoint(self._directory, self._name)
        self._peers = RayDoorPeers(self._directory, others, [worker for worker, _ in worker_names(config.cluster)])
        self._config = config
        self._model_folder = model_folder
        self._server: DoorServer | None = None
        self._port: int | None = None
        self._beating: asyncio.Task[None] | None = None

    async def start(self, max_request_tokens: int, port: int) -> int:
        """Load the tokenizer and listen; returns the port. Raises OSError when it is taken. Once a life.

        Args:
            max_request_tokens: of the largest request that every worker takes.
            port: where an earlier life listened, or the configured one.
        """
        if self._port is None:
            server = replace(self._config.server, port=port)
            config = replace(self._config, server=server)
            self._server = DoorServer(
                self._endpoint, config, self._model_folder, self._name, max_request_tokens, peers=self._peers
            )
            self._beating = self._beating or asyncio.create_task(self._beat())
            self._port = await self._server.start()
        return self._port

    async def on_tokens(self, batch: TokenBatch) -> None:
        """Tokens of one step, straight from a worker."""
        if self._server is not None:
            self._server.frontend.on_tokens(batch)

    async def on_notices(self, term: Term, notices: tuple[DoorNotice, ...]) -> None:
        """What the central scheduler has to say of requests."""
        if self._server is not None:
            self._server.frontend.on_notices(notices, term)

    async def follow_central(self, actor: str, term: Term) -> None:
        """This one has the term, and knows this door."""
        self._endpoint.follow_central(actor, term)

    async def introduce(self, actor: str, term: Term) -> None:
        """A new central scheduler asks which requests are open here."""
        self._endpoint.follow_central(actor, term)
        specs = self._server.frontend.claim(term) if self._server is not None else ()
        with contextlib.suppress(PeerError):
            self._directory.find(actor).claim.remote(self._name, specs)

    async def account(self) -> DoorAccount | None:
        """For another door; None before it was started."""
        return None if self._server is None else self._server.frontend.account()

    async def timeline(self, api_id: str) -> Mapping[str, object] | None:
        """For another door: of a request that this one took."""
        return None if self._server is None else self._server.frontend.timeline(api_id)

    async def drain(self) -> bool:
        """Refuse new requests; returns once open ones have ended, or False when they did not in time."""
        return self._server is None or await self._server.drain()

    async def stop(self) -> None:
        """Stop listening and end open streams."""
        if self._server is not None:
            await self._server.stop()

    async def look(self) -> DoorLook:
        """For the supervisor."""
        return DoorLook(os.getpid(), self._name, self._port)

    async def _beat(self) -> None:
        while True:
            for central in self._directory.centrals():  # one that does not know it asks, and is followed from then on
                central.door_heartbeat.remote(self._name)
            await asyncio.sleep(self._config.central.heartbeat_s)
