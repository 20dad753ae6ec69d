"""X-Request-Id: taken from the client, or made up, and returned with every answer."""

import re
from collections.abc import Callable

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_HEADER = "x-request-id"
_ACCEPTABLE = re.compile(r"[\x21-\x7e]{1,128}")


class RequestIdMiddleware:
    """Wraps an ASGI app."""

    def __init__(self, app: ASGIApp, id_source: Callable[[], str]) -> None:
        """Args.

        app: the inner app.
        id_source: makes ids for clients that bring none, or one that cannot be a header value.
        """
        self._app = app
        self._id_source = id_source

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request (ASGI)."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(_HEADER, "")
        request_id = given if _ACCEPTABLE.fullmatch(given) else self._id_source()

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[_HEADER] = request_id
            await send(message)

        await self._app(scope, receive, send_with_id)
