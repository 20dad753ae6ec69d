"""`DoorActor`: one front door's process, and its way to the central scheduler."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ray

from configs import DeploymentConfig
from kvtransfer.errors import PeerError
from scheduler.messages import DoorNotice, SubmitReply, TokenBatch
from scheduler.spec import DoorName, RequestSpec, RequestUid
from serving.actors.directory import CENTRAL_NAME, ActorPlace, Directory, prepare_process
from serving.api.http_server import DoorServer
from serving.endpoint import EndpointUnavailableError


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
        prepare_process(place, name)
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

    async def drain(self) -> bool:
        """Refuse new requests; returns once open ones have ended, or False when they did not in time."""
        return self._server is None or await self._server.drain()

    async def stop(self) -> None:
        """Stop listening and end open streams."""
        if self._server is not None:
            await self._server.stop()

    async def ping(self) -> int:
        """Lives; returns the process id."""
        return os.getpid()
