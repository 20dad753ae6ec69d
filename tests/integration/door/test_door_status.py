"""What the door tells about itself, the cluster and its requests."""

from pathlib import Path
from typing import Any

import pytest

from tests.fakes.door import CONTEXT_LENGTH, MODEL, eventually, open_door, run_async
from tests.integration.door.test_door_errors import assert_openai_error


@run_async
async def test_health_is_200_only_when_work_can_progress(tiny_folder: Path) -> None:
    async with open_door(tiny_folder) as door:
        assert (await door.client.get("/health")).status_code == 200
        door.cluster.unhealthy = "no generation worker"
        answer = await door.client.get("/health")
        assert (answer.status_code, answer.json()["reason"]) == (503, "no generation worker")
        assert answer.headers["retry-after"]
        door.cluster.unhealthy = ""
        door.cluster.is_reachable = False
        assert (await door.client.get("/health")).status_code == 503
        door.cluster.is_reachable = True
        assert (await door.client.get("/health")).status_code == 200


@run_async
async def test_a_scheduler_that_does_not_answer_is_a_503_in_time(tiny_folder: Path) -> None:
    async with open_door(tiny_folder, submit_timeout_s=0.05) as door:
        door.cluster.answers.clear()
        answer = await door.client.get("/health")
        assert (answer.status_code, answer.json()["reason"]) == (503, "the scheduler did not answer in 0.05 s")
        assert_openai_error(await door.client.get("/cluster/state"), 503)
        for answer in (await door.complete(), await door.chat(stream=True)):
            assert_openai_error(answer, 503)
            assert answer.headers["retry-after"]
        door.cluster.answers.set()
        # The late submissions are taken back.
        await eventually(lambda: len(door.cluster.submissions) == 2 and not door.cluster.running)


@run_async
async def test_a_draining_door_refuses_new_requests_and_says_so(tiny_folder: Path) -> None:
    async with open_door(tiny_folder) as door:
        door.frontend.start_draining()
        error = assert_openai_error(await door.complete(), 503)
        assert "draining" in error["message"]
        assert (await door.client.get("/health")).json()["reason"] == "draining"


@run_async
async def test_a_request_that_is_never_finished_ends_at_the_doors_own_deadline(tiny_folder: Path) -> None:
    async with open_door(tiny_folder, is_pumping=False, request_timeout_s=0.03) as door:
        error = assert_openai_error(await door.complete(), 504)
        assert error["code"] == "deadline"
        await eventually(lambda: not door.cluster.running)


@run_async
async def test_models_and_version_are_told(tiny_folder: Path) -> None:
    async with open_door(tiny_folder) as door:
        listed = (await door.client.get("/v1/models")).json()
        single = (await door.client.get(f"/v1/models/{MODEL}")).json()
        version = (await door.client.get("/version")).json()
    card = {
        "id": MODEL,
        "object": "model",
        "created": 1_700_000_000,
        "owned_by": "pdserve",
        "max_model_len": CONTEXT_LENGTH,
    }
    assert listed == {"object": "list", "data": [card]}
    assert single == card
    assert version == {"version": "1.2.3"}


@run_async
async def test_cluster_state_is_the_schedulers_with_the_door_added(tiny_folder: Path) -> None:
    async with open_door(tiny_folder) as door:
        await door.complete()
        state = (await door.client.get("/cluster/state")).json()
    assert (state["central"]["term"], state["central"]["running"]) == (1, 0)
    assert state["door"] == {"name": "door", "open_choices": 0, "counters": {"requests": 1}}


@run_async
async def test_a_timeline_tells_every_phase_of_every_choice(tiny_folder: Path) -> None:
    async with open_door(tiny_folder) as door:
        door.cluster.cached_tokens = 2
        answer = (await door.complete(prompt="Once upon a time", n=2, max_tokens=5, ignore_eos=True)).json()
        timeline: dict[str, Any] = (await door.client.get(f"/requests/{answer['id']}")).json()
    assert (timeline["id"], timeline["state"]) == (answer["id"], "finished")
    assert [choice["index"] for choice in timeline["choices"]] == [0, 1]
    for choice in timeline["choices"]:
        assert choice["prompt_tokens"] == answer["usage"]["prompt_tokens"]
        assert (choice["completion_tokens"], choice["cached_tokens"]) == (5, 2)
        assert (choice["state"], choice["finish_reason"]) == ("finished", "length")
        assert choice["phases"]["context_s"] == 0.5
        assert choice["phases"]["transfer_s"] == 0.125
        assert choice["phases"]["generation_s"] == 0.25
        assert choice["phases"]["queued_s"] >= 0
        assert 0 <= choice["time_to_first_token_s"] <= choice["total_s"]
        assert choice["workers"][0]["worker"] == "generation-0"


@run_async
async def test_timelines_of_running_failed_and_forgotten_requests(tiny_folder: Path) -> None:
    async with open_door(tiny_folder, is_pumping=False, kept_timelines=2, request_timeout_s=0.02) as door:
        for number in range(1, 4):
            await door.complete()
            timeline = door.frontend.timeline(f"cmpl-id{2 * number}")
            assert timeline is not None
            assert timeline["state"] == "failed"
        statuses = [(await door.client.get(f"/requests/cmpl-id{n}")).status_code for n in (2, 4, 6)]
    assert statuses == [404, 200, 200]


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/nowhere"])
@run_async
async def test_a_request_id_is_returned_or_made(tiny_folder: Path, path: str) -> None:
    async with open_door(tiny_folder) as door:
        kept = await door.client.get(path, headers={"X-Request-Id": "abc-123"})
        made = await door.client.get(path)
        replaced = await door.client.get(path, headers={"X-Request-Id": "x" * 500})
    assert kept.headers["x-request-id"] == "abc-123"
    assert made.headers["x-request-id"].startswith("id")
    assert replaced.headers["x-request-id"].startswith("id")


@run_async
async def test_a_generating_request_returns_its_request_id_too(tiny_folder: Path) -> None:
    async with open_door(tiny_folder) as door:
        headers = {"X-Request-Id": "mine"}
        body = {"model": MODEL, "prompt": "Once", "stream": True}
        for path, expected in (("/v1/completions", 200), ("/v1/chat/completions", 400)):
            answer = await door.client.post(path, json=body, headers=headers)
            assert (answer.status_code, answer.headers["x-request-id"]) == (expected, "mine")
