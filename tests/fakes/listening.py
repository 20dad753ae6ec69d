"""`listening`: an app behind a real socket of this host, inside the running loop, as a door actor runs it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import uvicorn
from starlette.types import ASGIApp

from serving.api.head_deadline import HeadDeadlineProtocol
from tests.fakes.door import eventually


@asynccontextmanager
async def listening(app: ASGIApp, http: type[asyncio.Protocol] = HeadDeadlineProtocol) -> AsyncIterator[str]:
    """Serve `app` on a free port, over connections of class `http`; its URL."""
    config = uvicorn.Config(app, port=0, http=http, ws="none", log_level="warning", lifespan="off")
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve())
    await eventually(lambda: server.started)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        await serving
