"""API keys, pages of other origins, and a door that is told to end."""

import asyncio
from pathlib import Path

import pytest

from configs import ServerConfig
from tests.fakes.door import MODEL, eventually, open_door, run_async

BODY = {"model": MODEL, "prompt": "Once", "max_tokens": 3}


@pytest.mark.parametrize(
    "headers",
    [{}, {"Authorization": "Bearer"}, {"Authorization": "Bearer k2"}, {"Authorization": "Basic k1"}, {"X": "k1"}],
)
@run_async
async def test_without_its_key_the_door_answers_401_and_runs_nothing(
    tiny_folder: Path, headers: dict[str, str]
) -> None:
    async with open_door(tiny_folder, config=ServerConfig(api_keys=("k1", "other"))) as door:
        for method, path in (("POST", "/v1/completions"), ("GET", "/v1/models"), ("GET", "/cluster/state")):
            answer = await door.client.request(method, path, json=BODY, headers=headers)
            assert answer.status_code == 401
            assert answer.json()["error"]["code"] == "invalid_api_key"
            assert answer.headers["x-request-id"]
        assert door.cluster.submissions == []
        assert (await door.client.get("/health")).status_code == 200


@run_async
async def test_any_of_the_keys_opens_the_door(tiny_folder: Path) -> None:
    async with open_door(tiny_folder, config=ServerConfig(api_keys=("k1", "other"))) as door:
        for key in ("k1", "other"):
            answer = await door.client.post("/v1/completions", json=BODY, headers={"Authorization": f"Bearer {key}"})
            assert answer.status_code == 200


@run_async
async def test_only_named_origins_may_call_from_a_browser(tiny_folder: Path) -> None:
    config = ServerConfig(cors_origins=("https://a.example",), api_keys=("k1",))
    async with open_door(tiny_folder, config=config) as door:
        asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
        allowed = await door.client.options("/v1/completions", headers={"Origin": "https://a.example", **asked})
        refused = await door.client.options("/v1/completions", headers={"Origin": "https://b.example", **asked})
    assert allowed.headers["access-control-allow-origin"] == "https://a.example"
    assert "access-control-allow-origin" not in refused.headers


@run_async
async def test_a_draining_door_finishes_its_streams_and_takes_nothing_new(tiny_folder: Path) -> None:
    async with open_door(tiny_folder, is_pumping=False) as door:
        expected = asyncio.create_task(door.complete(seed=1, max_tokens=8, ignore_eos=True))
        await eventually(lambda: len(door.cluster.running) == 1)
        door.cluster.step()
        door.frontend.start_draining()
        refused = await door.complete()
        health = await door.client.get("/ready")
        assert door.frontend.num_unanswered == 1
        for _ in range(7):
            door.cluster.step()
        answer = await expected
        assert door.frontend.num_unanswered == 0
    assert refused.status_code == health.status_code == 503
    assert refused.headers["retry-after"] == health.headers["retry-after"] == "1"
    assert answer.json()["usage"]["completion_tokens"] == 8
