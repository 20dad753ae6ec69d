"""API keys: who may ask this server for anything but its health."""

import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from serving.api.errors import ApiError

OPEN_PATHS = frozenset({"/health", "/ready", "/version", "/metrics"})
"""What load balancers and monitoring read without a key."""


class ApiKeyMiddleware:
    """Wraps an ASGI app; without keys everybody may ask everything."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        """Args.

        app: the inner app.
        keys: any of them opens the door.
        """
        self._app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request (ASGI)."""
        if scope["type"] != "http" or not self._keys or scope["path"] in OPEN_PATHS or self._is_known(scope):
            await self._app(scope, receive, send)
            return
        error = ApiError(
            401,
            "Missing or incorrect API key. Send it as 'Authorization: Bearer KEY'.",
            code="invalid_api_key",
            # The body was not read, so the connection cannot be used again.
            headers={"WWW-Authenticate": "Bearer", "Connection": "close"},
        )
        await error.response()(scope, receive, send)

    def _is_known(self, scope: Scope) -> bool:
        kind, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
        presented = given.strip().encode()
        # Every key is compared, in constant time: neither the time nor the order tells anything.
        matches = [hmac.compare_digest(presented, key) for key in self._keys]
        return kind.lower() == "bearer" and any(matches)
