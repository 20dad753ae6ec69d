"""`RayDoorPeers`: the other processes of a deployment, as a door asks them over Ray."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import ray

from kvtransfer.errors import PeerError
from serving.actors.directory import CENTRAL_NAME, Directory
from serving.door_peers import DoorAccount
from serving.tracing.chrome import AnchoredHistory
from serving.tracing.history import WorkerHistory

_TIMEOUT_S = 1.0  # a door that stands still must not make the others do so
_HISTORY_TIMEOUT_S = 5.0  # a worker answers between two steps
_T = TypeVar("_T")


class RayDoorPeers:
    """Asks all of them at once; who does not answer in time is left out."""

    def __init__(self, directory: Directory, doors: Sequence[str], workers: Sequence[str]) -> None:
        """Args.

        directory: finds them.
        doors: names of the other doors.
        workers: names of the workers.
        """
        self._directory = directory
        self._names = tuple(doors)
        self._workers = tuple(workers)

    async def accounts(self) -> Sequence[DoorAccount]:
        """Of those that answer."""
        answers: list[DoorAccount | None] = await self._ask_all(lambda door: door.account.remote())
        return [account for account in answers if account is not None]

    async def timeline(self, api_id: str) -> Mapping[str, object] | None:
        """Of a request that one of them took."""
        answers: list[Mapping[str, object] | None] = await self._ask_all(lambda door: door.timeline.remote(api_id))
        return next((timeline for timeline in answers if timeline is not None), None)

    async def histories(self, seconds: float) -> Sequence[AnchoredHistory]:
        """Of those that answer."""
        names = (CENTRAL_NAME, *self._workers)
        answers = await asyncio.gather(*(self._history(name, seconds) for name in names))
        return [answer for answer in answers if answer is not None]

    async def _history(self, name: str, seconds: float) -> AnchoredHistory | None:
        asked_at_s = time.monotonic()
        history: WorkerHistory | None = await self._ask(
            name, lambda process: process.history.remote(seconds), _HISTORY_TIMEOUT_S
        )
        return None if history is None else AnchoredHistory(history, (asked_at_s + time.monotonic()) / 2)

    async def _ask_all(self, call: Callable[[Any], Any]) -> list[_T | None]:
        return list(await asyncio.gather(*(self._ask(name, call) for name in self._names)))

    async def _ask(self, name: str, call: Callable[[Any], Any], timeout_s: float = _TIMEOUT_S) -> _T | None:
        try:
            async with asyncio.timeout(timeout_s):
                answer: _T = await call(self._directory.find(name))
                return answer
        except (PeerError, ray.exceptions.RayError, TimeoutError):
            self._directory.forget(name)
            return None
