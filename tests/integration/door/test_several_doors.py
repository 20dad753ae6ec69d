"""Two doors of one deployment: each answers for both."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from unittest.mock import patch

import httpx
from prometheus_client.parser import text_string_to_metric_families

from configs import ServerConfig
from serving.api.app import create_app
from serving.door_peers import DoorAccount
from serving.frontend import Frontend
from serving.tracing.chrome import AnchoredHistory
from tests.fakes.door import Door, open_door, run_async


class Neighbour:
    """The other door, without a process between."""

    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend

    async def accounts(self) -> Sequence[DoorAccount]:
        return [self._frontend.account()]

    async def timeline(self, api_id: str) -> Mapping[str, object] | None:
        return self._frontend.timeline(api_id)

    async def histories(self, seconds: float) -> Sequence[AnchoredHistory]:
        return ()


@asynccontextmanager
async def two_doors(folder: Path) -> AsyncIterator[tuple[Door, Door, httpx.AsyncClient]]:
    """Both doors, and a client of the first whose peer is the second."""
    async with open_door(folder, name="door-0#1") as first, open_door(folder, name="door-1#1") as second:
        app = create_app(first.frontend, ServerConfig(), "1", peers=Neighbour(second.frontend))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://door") as client:
            yield first, second, client


@run_async
async def test_a_request_is_found_at_whichever_door_is_asked(tiny_folder: Path) -> None:
    async with two_doors(tiny_folder) as (first, second, client):
        # Both doors of this test count their ids from 1.
        await first.complete(max_tokens=2)
        owned = [(await second.complete(max_tokens=3)).json()["id"] for _ in range(2)][-1]
        answer = await client.get(f"/requests/{owned}")
        assert (answer.status_code, answer.json()["door"], answer.json()["choices"][0]["completion_tokens"]) == (
            200, "door-1", 3,
        )  # fmt: skip
        assert (await client.get("/requests/cmpl-unknown")).status_code == 404


@run_async
async def test_metrics_are_the_same_whichever_door_is_scraped(tiny_folder: Path) -> None:
    async with two_doors(tiny_folder) as (first, second, client):
        await first.complete(max_tokens=2, ignore_eos=True)
        await second.complete(max_tokens=5, ignore_eos=True)
        text = (await client.get("/metrics")).text
        assert text.count("# TYPE vllm:generation_tokens_total counter") == 1
        (family,) = [f for f in text_string_to_metric_families(text) if f.name == "vllm:generation_tokens"]
        totals = {s.labels["door"]: s.value for s in family.samples if s.name.endswith("_total")}
        assert totals == {"door-0": 2, "door-1": 5}


@run_async
async def test_the_cluster_state_names_every_door(tiny_folder: Path) -> None:
    async with two_doors(tiny_folder) as (_, second, client):
        await second.complete(max_tokens=1)
        doors = (await client.get("/cluster/state")).json()["doors"]
        assert [(door["name"], door["counters"].get("requests", 0)) for door in doors] == [
            ("door-0#1", 0), ("door-1#1", 1),
        ]  # fmt: skip


@run_async
async def test_a_prompt_that_takes_long_to_tokenize_does_not_stop_the_event_loop(tiny_folder: Path) -> None:
    config = ServerConfig(max_body_bytes=1 << 22)
    async with open_door(tiny_folder, config=config, context_length=1 << 20, max_request_tokens=1 << 20) as door:
        num_turns, turns_meanwhile = 0, []
        encode = door.tokenizer.encode

        def watched(text: str, *, add_special_tokens: bool = True) -> list[int]:
            before = num_turns
            token_ids = encode(text, add_special_tokens=add_special_tokens)
            turns_meanwhile.append(num_turns - before)
            return token_ids

        async def turn() -> None:
            nonlocal num_turns
            while not turns_meanwhile:
                num_turns += 1
                await asyncio.sleep(0)

        turning = asyncio.create_task(turn())
        await asyncio.sleep(0)  # it has begun
        with patch.object(door.tokenizer, "encode", watched):
            answer = await door.complete(prompt="the quick brown fox " * 20_000, max_tokens=1)
        await turning
        assert answer.json()["usage"]["prompt_tokens"] > 20_000
        assert turns_meanwhile[0] > 10


@run_async
async def test_a_trace_of_no_sensible_length_is_refused(tiny_folder: Path) -> None:
    async with two_doors(tiny_folder) as (_, _, client):
        for seconds in ("0", "-3", "nan", "inf", "soon", ""):
            answer = await client.get("/trace", params={"seconds": seconds})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "seconds")
        assert (await client.get("/trace")).json()["displayTimeUnit"] == "ms"
