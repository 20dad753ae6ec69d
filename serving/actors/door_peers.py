"""`RayDoorPeers`: the other doors of a deployment, over Ray."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import ray

from kvtransfer.errors import PeerError
from serving.actors.directory import Directory
from serving.door_peers import DoorAccount

_TIMEOUT_S = 1.0  # a door that stands still must not make the others do so
_T = TypeVar("_T")


class RayDoorPeers:
    """Asks all of them at once; who does not answer in time is left out."""

    def __init__(self, directory: Directory, names: Sequence[str]) -> None:
        """Args.

        directory: finds them.
        names: of the other doors.
        """
        self._directory = directory
        self._names = tuple(names)

    async def accounts(self) -> Sequence[DoorAccount]:
        """Of those that answer."""
        answers: list[DoorAccount | None] = await self._ask_all(lambda door: door.account.remote())
        return [account for account in answers if account is not None]

    async def timeline(self, api_id: str) -> Mapping[str, object] | None:
        """Of a request that one of them took."""
        answers: list[Mapping[str, object] | None] = await self._ask_all(lambda door: door.timeline.remote(api_id))
        return next((timeline for timeline in answers if timeline is not None), None)

    async def _ask_all(self, call: Callable[[Any], Any]) -> list[_T | None]:
        return list(await asyncio.gather(*(self._ask(name, call) for name in self._names)))

    async def _ask(self, name: str, call: Callable[[Any], Any]) -> _T | None:
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                answer: _T = await call(self._directory.find(name))
                return answer
        except (PeerError, ray.exceptions.RayError, TimeoutError):
            self._directory.forget(name)
            return None
