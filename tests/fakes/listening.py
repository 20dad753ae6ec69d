"""`listening`: an app behind a real socket of this host, inside the running loop, as a door actor runs it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import uvicorn
from starlette.types import ASGIApp

from tests.fakes.door import eventually


@asynccontextmanager
async def listening(app: ASGIApp) -> AsyncIterator[str]:
    """Serve `app` on a free port; its URL."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", lifespan="off"))
    serving = asyncio.create_task(server.serve())
    await eventually(lambda: server.started)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        await serving
