"""`create_app`: the HTTP API of one door. Owns routes; knows no scheduler, no Ray and no process.

The app runs inside whatever event loop serves it, which must be the frontend's.
"""

import logging
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from functools import wraps
from uuid import uuid4

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from configs import ServerConfig
from serving.api.access import ApiKeyMiddleware
from serving.api.all_doors import AllDoors, door_states
from serving.api.cockpit import CockpitEndpoints
from serving.api.errors import RETRY_AFTER_S, ApiError, internal_error, of_failure
from serving.api.generation import GenerationEndpoints
from serving.api.openapi import describe
from serving.api.prepare import RequestPreparer
from serving.api.request_id import RequestIdMiddleware
from serving.door_peers import DoorPeers, NoPeers
from serving.frontend import Frontend
from serving.generation_request import RequestFailedError

_log = logging.getLogger(__name__)

Handler = Callable[[Request], Awaitable[Response]]


def _unix_now() -> float:
    return datetime.now(UTC).timestamp()


def _fresh_id() -> str:
    return uuid4().hex


def create_app(
    frontend: Frontend,
    config: ServerConfig,
    version: str,
    *,
    wall_clock: Callable[[], float] = _unix_now,
    id_source: Callable[[], str] = _fresh_id,
    peers: DoorPeers | None = None,
) -> FastAPI:
    """Make the app.

    Args:
        frontend: owns the requests.
        config: limits of one HTTP request.
        version: of this software.
        wall_clock: Unix seconds, for `created` only.
        id_source: unique strings for ids.
        peers: the other doors; None when there are none.
    """
    model = frontend.settings.model_name
    preparer = RequestPreparer(
        frontend.tokenizer, frontend.settings, config, model, wall_clock=wall_clock, id_source=id_source
    )
    frontend.closing.append(preparer.close)
    generation = GenerationEndpoints(frontend, preparer, config.max_body_bytes)
    doors = AllDoors(frontend, peers or NoPeers())
    status = StatusEndpoints(frontend, doors, preparer, model, version, created=int(wall_clock()))
    cockpit = CockpitEndpoints(frontend, doors, model, version)
    app = FastAPI(title="pdserve", version=version, openapi_url=None, redirect_slashes=False)
    routes: dict[tuple[str, str], Handler] = {
        ("POST", "/v1/completions"): generation.completions,
        ("POST", "/v1/chat/completions"): generation.chat_completions,
        ("GET", "/v1/models"): status.models,
        ("GET", "/v1/models/{name:path}"): status.model,
        ("GET", "/health"): status.health,
        ("GET", "/ready"): status.health,
        ("GET", "/version"): status.version,
        ("GET", "/requests/{api_id}"): status.request_timeline,
        ("GET", "/cluster/state"): status.cluster_state,
        ("GET", "/openapi.json"): status.description,
        ("GET", "/metrics"): cockpit.metrics,
        ("GET", "/trace"): cockpit.trace,
        ("GET", "/dashboard"): cockpit.dashboard,
        ("GET", "/dashboard/events"): cockpit.events,
    }
    for (method, path), handler in routes.items():
        app.add_route(path, _guarded(handler), methods=[method], include_in_schema=False)
    app.add_exception_handler(HTTPException, _on_http_error)
    # The last one added is the outermost: a refused request has an id, and a preflight needs no key.
    app.add_middleware(ApiKeyMiddleware, keys=config.api_keys)
    if config.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    app.add_middleware(RequestIdMiddleware, id_source=id_source)
    return app


class StatusEndpoints:
    """Everything that only tells."""

    def __init__(
        self,
        frontend: Frontend,
        doors: AllDoors,
        preparer: RequestPreparer,
        model: str,
        version: str,
        *,
        created: int,
    ) -> None:
        """Args.

        frontend: knows the cluster.
        doors: know requests.
        preparer: knows the model's name.
        model: the name in the API.
        version: of this software.
        created: Unix seconds of the start.
        """
        self._frontend = frontend
        self._doors = doors
        self._preparer = preparer
        self._version = version
        self._description = describe(model, version)
        self._card: dict[str, object] = {
            "id": model,
            "object": "model",
            "created": created,
            "owned_by": "pdserve",
            "max_model_len": frontend.settings.context_length,
        }

    async def models(self, request: Request) -> Response:
        """GET /v1/models."""
        return JSONResponse({"object": "list", "data": [self._card]})

    async def model(self, request: Request) -> Response:
        """GET /v1/models/{name}."""
        self._preparer.check_model(request.path_params["name"])
        return JSONResponse(self._card)

    async def health(self, request: Request) -> Response:
        """GET /health and /ready: 200 only when a request sent now can make progress (I11)."""
        is_healthy, reason = await self._frontend.health()
        if is_healthy:
            return JSONResponse({"status": "ok"})
        headers = {"Retry-After": str(int(RETRY_AFTER_S))}
        return JSONResponse({"status": "unavailable", "reason": reason}, 503, headers)

    async def version(self, request: Request) -> Response:
        """GET /version."""
        return JSONResponse({"version": self._version})

    async def description(self, request: Request) -> Response:
        """GET /openapi.json: this API in OpenAPI's words."""
        return JSONResponse(self._description)

    async def request_timeline(self, request: Request) -> Response:
        """GET /requests/{id}: where the time of a running or recent request went."""
        api_id = request.path_params["api_id"]
        timeline = await self._doors.timeline(api_id)
        if timeline is None:
            msg = f"No running or recent request of this server has the id {api_id[:200]!r}."
            raise ApiError(404, msg, code="request_not_found")
        return JSONResponse(timeline)

    async def cluster_state(self, request: Request) -> Response:
        """GET /cluster/state."""
        try:
            state = await self._frontend.cluster_state()
        except RequestFailedError as error:
            raise of_failure(error) from error
        return JSONResponse({**state, "doors": door_states(await self._doors.accounts())})


def _guarded(handler: Handler) -> Handler:
    """Turn every error into an answer with OpenAI's body."""

    @wraps(handler)
    async def guarded(request: Request) -> Response:
        try:
            return await handler(request)
        except ApiError as error:
            return error.response()
        except ClientDisconnect:
            return Response(status_code=499)
        except Exception:
            _log.exception("%s %s failed", request.method, request.url.path)
            return internal_error().response()

    return guarded


async def _on_http_error(request: Request, error: Exception) -> Response:
    """The router's own refusals: no such path, or not this method."""
    assert isinstance(error, HTTPException)
    where = f"{request.method} {request.url.path[:200]}"
    messages = {404: f"Unknown request URL: {where}", 405: f"Method not allowed: {where}"}
    codes = {404: "unknown_url", 405: "method_not_allowed"}
    message = messages.get(error.status_code, str(error.detail))
    return ApiError(error.status_code, message, code=codes.get(error.status_code), headers=error.headers).response()
