"""`AsgiExchange`: one HTTP request driven by hand, with a client that can leave or stop reading.

httpx's ASGI transport collects a whole answer before it returns, so it can do neither.
"""

import asyncio
import json
from typing import Any

from starlette.types import ASGIApp, Message


class AsgiExchange:
    """A POST with a JSON body.

    Attributes:
        messages: what the app has sent so far.
        reads: cleared, the client takes nothing: the app's `send` blocks.
    """

    def __init__(self, app: ASGIApp, path: str, body: dict[str, Any]) -> None:
        """Nothing is sent before `start`."""
        self.messages: list[Message] = []
        self.reads = asyncio.Event()
        self.reads.set()
        self._app = app
        self._path = path
        self._incoming: list[Message] = [
            {"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}
        ]
        self._has_left = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Send the request."""
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "path": self._path,
            "raw_path": self._path.encode(),
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
            "scheme": "http",
            "server": ("door", 80),
            "client": ("127.0.0.1", 9),
        }

        async def run() -> None:
            await self._app(scope, self._receive, self._send)

        self._task = asyncio.get_running_loop().create_task(run())

    def leave(self) -> None:
        """The client closes the connection."""
        self._has_left.set()

    async def finished(self, timeout_s: float = 2.0) -> None:
        """The app is done with the request. Raises what it raised, or TimeoutError."""
        assert self._task is not None
        async with asyncio.timeout(timeout_s):
            await self._task

    @property
    def status(self) -> int | None:
        """Status of the head, once it was sent."""
        return self.messages[0]["status"] if self.messages else None

    @property
    def text(self) -> str:
        """The body so far."""
        return b"".join(message.get("body", b"") for message in self.messages[1:]).decode()

    async def _receive(self) -> Message:
        if self._incoming:
            return self._incoming.pop(0)
        await self._has_left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        await self.reads.wait()
        if not self._has_left.is_set():
            self.messages.append(message)
