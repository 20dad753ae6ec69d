"""Work that ends when its client leaves, whether the answer streams or not."""

import asyncio
from collections.abc import Coroutine
from typing import TypeVar

from starlette.types import Receive

_T = TypeVar("_T")


class ClientDisconnectedError(Exception):
    """The client has closed the connection; nobody waits for an answer."""


async def until_disconnect(receive: Receive, work: Coroutine[object, object, _T]) -> _T:
    """Run `work`; cancel it as soon as the client is gone.

    Args:
        receive: the ASGI channel; the request body must have been read.
        work: cleans up after itself when cancelled.

    Raises:
        ClientDisconnectedError: the client left first; `work` has ended.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnectedError
    finally:
        for pending in (task, watcher):
            pending.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
