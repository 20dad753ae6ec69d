"""GET /openapi.json: describes what is served, and refers to nothing that it does not have."""

import re
from pathlib import Path

from fastapi import FastAPI
from starlette.routing import Route

from tests.fakes.door import open_door, run_async

# For machines of other kinds: a scraper, and a page with its events.
_UNDESCRIBED = {"/metrics", "/trace", "/dashboard", "/dashboard/events", "/openapi.json"}


@run_async
async def test_every_path_is_described_and_every_described_one_is_served(tiny_folder: Path) -> None:
    async with open_door(tiny_folder) as door:
        answer = await door.client.get("/openapi.json")
        assert isinstance(door.app, FastAPI)
        routes = [route for route in door.app.routes if isinstance(route, Route)]
    served = {(route.path.replace(":path", ""), method.lower()) for route in routes for method in route.methods or ()}
    described = {(path, method) for path, methods in answer.json()["paths"].items() for method in methods}
    assert described == {(path, method) for path, method in served if method != "head" and path not in _UNDESCRIBED}


@run_async
async def test_every_reference_has_its_schema(tiny_folder: Path) -> None:
    async with open_door(tiny_folder) as door:
        answer = await door.client.get("/openapi.json")
    names = set(re.findall(r'"#/components/schemas/([^"]+)"', answer.text))
    assert names <= set(answer.json()["components"]["schemas"])
    assert {"CompletionRequest", "ChatCompletionRequest", "Error"} <= names
