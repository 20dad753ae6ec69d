"""What an operator looks at: GET /metrics, GET /trace, and the dashboard with its live events."""

import asyncio
import json
import time
from collections.abc import AsyncGenerator
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response, StreamingResponse

from serving.api.all_doors import AllDoors, newest_requests, recent_latencies
from serving.api.errors import ApiError
from serving.frontend import Frontend
from serving.generation_request import RequestFailedError
from serving.metrics import CONTENT_TYPE, ClusterSamples, render

_PERIOD_S = 1.0
_RECENT_REQUESTS = 40
_TRACE_S = 60.0
_MAX_TRACE_S = 86_400.0
_PAGE_HEADERS = {
    # One file, nothing from outside: the browser enforces it.
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:",
    "Cache-Control": "no-cache",
}


class CockpitEndpoints:
    """Routes that only watch."""

    def __init__(self, frontend: Frontend, doors: AllDoors, model: str, version: str) -> None:
        """Args.

        frontend: knows the cluster.
        doors: know their streams.
        model: the name in the API.
        version: of this software.
        """
        self._frontend = frontend
        self._doors = doors
        self._model = model
        self._version = version
        self._watch = ClusterWatch(frontend)
        self._page = files("serving.api").joinpath("dashboard.html").read_text("utf-8")

    async def metrics(self, request: Request) -> Response:
        """GET /metrics: 200 also without the central scheduler; `pdserve:up` tells."""
        state = await _state_or_none(self._frontend)
        doors = [account.metrics for account in await self._doors.accounts()]
        body = render(doors, ClusterSamples(self._model, state))
        return Response(body, media_type=CONTENT_TYPE)

    async def trace(self, request: Request) -> Response:
        """GET /trace?seconds=N: what every process did lately, for Perfetto."""
        given = request.query_params.get("seconds", str(_TRACE_S))
        try:
            seconds = float(given)
        except ValueError:
            seconds = -1.0
        if not 0 < seconds < _MAX_TRACE_S:
            msg = f"seconds={given[:40]!r} is not a number between 0 and {_MAX_TRACE_S}"
            raise ApiError(400, msg, param="seconds")
        return Response(await self._doors.chrome_trace(seconds), media_type="application/json")

    async def dashboard(self, request: Request) -> Response:
        """GET /dashboard: one static page."""
        return HTMLResponse(self._page, headers=_PAGE_HEADERS)

    async def events(self, request: Request) -> Response:
        """GET /dashboard/events: the account of everything, about once a second."""
        return StreamingResponse(self._events(), media_type="text/event-stream", headers={"Cache-Control": "no-store"})

    async def _events(self) -> AsyncGenerator[str, None]:
        while True:
            accounts = await self._doors.accounts()
            event = {
                "model": self._model,
                "version": self._version,
                "cluster": await self._watch.state(),
                "latency": recent_latencies(accounts).to_json(),
                "requests": newest_requests(accounts, _RECENT_REQUESTS),
            }
            yield f"data: {json.dumps(event)}\n\n"
            if self._frontend.is_closed:
                return
            await asyncio.sleep(_PERIOD_S)


class ClusterWatch:
    """One account for all who look at the same time: many open pages ask the cluster no oftener than one."""

    def __init__(self, frontend: Frontend) -> None:
        """Args: the way to the cluster."""
        self._frontend = frontend
        self._state: dict[str, object] | None = None
        self._taken_at_s = float("-inf")
        self._asking = asyncio.Lock()

    async def state(self) -> dict[str, object] | None:
        """An account that is at most half a period old; None when there is none."""
        async with self._asking:
            if time.monotonic() - self._taken_at_s > _PERIOD_S / 2:
                self._state = await _state_or_none(self._frontend)
                self._taken_at_s = time.monotonic()
            return self._state


async def _state_or_none(frontend: Frontend) -> dict[str, object] | None:
    """The cluster's; None when the central scheduler cannot be reached."""
    try:
        return await frontend.cluster_state()
    except RequestFailedError:
        return None
