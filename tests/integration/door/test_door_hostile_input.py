"""Bodies and connections made to break the door: it answers with a client error, and lives."""

import asyncio
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.requests import Request
from starlette.types import Message

from configs import ServerConfig
from serving.api.body import read_json_object
from serving.api.errors import ApiError
from serving.api.schema import ChatCompletionRequest, CompletionRequest
from tests.fakes.door import MODEL, open_door, run_async
from tests.fakes.tiny_tokenizer import make_tokenizer_folder
from tests.integration.door.sse import events
from tests.integration.door.test_door_errors import assert_openai_error

_FIELDS = (
    "prompt", "messages", "max_tokens", "max_completion_tokens", "n", "best_of", "stop", "stream", "stream_options",
    "echo", "logprobs", "seed", "temperature", "top_p", "top_k", "min_p", "ignore_eos", "stop_token_ids", "priority",
    "include_stop_str_in_output", "logit_bias", "user", "tools", "response_format", "model", "x", "model_config",
    "__class__", "self", "unknown_fields",
)  # fmt: skip

_scalars = (
    st.none()
    | st.booleans()
    | st.integers(-3, 5)
    | st.sampled_from([10**30, -(2**63), 2**64, 0.5, 1e308, -0.0, 1e-300, "", "a", "stop", "\x00", "😀", "\u2028"])
    | st.text(max_size=5)
)
_json = st.recursive(
    _scalars,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["role", "content", "type", "text", "include_usage", "k"]), inner, max_size=3)
    ),
    max_leaves=6,
)
_bodies = st.dictionaries(st.sampled_from(_FIELDS), _json, max_size=6)


@settings(max_examples=30, deadline=None, derandomize=True, database=None)
@given(st.lists(st.tuples(_bodies, st.sampled_from(["completions", "chat/completions"])), min_size=1, max_size=10))
def test_no_json_object_at_all_makes_the_door_fail(requests: list[tuple[dict[str, Any], str]]) -> None:
    async def attack() -> None:
        async with open_door(_folder()) as door:
            for body, path in requests:
                required = {"model": MODEL, "prompt": "Once", "messages": [{"role": "user", "content": "Hi"}]}
                assert_answered(await door.client.post(f"/v1/{path}", json={**required, **body}))

    asyncio.run(attack())


def assert_answered(answer: httpx.Response) -> None:
    if answer.status_code != 200:
        assert_openai_error(answer, 404 if answer.status_code == 404 else 400)
    elif answer.headers["content-type"].startswith("text/event-stream"):
        assert events(answer.text)
    else:
        assert answer.json()["choices"]


@cache
def _folder() -> Path:
    return make_tokenizer_folder(Path(mkdtemp()))


@pytest.mark.parametrize(
    "text",
    [
        "\x00",
        "\u2028\u2029\x85",
        "\ufeff",
        "e\u0301\u0301" * 20,
        "👨‍👩‍👧‍👦" * 3,
        "‮abc",
        "<|im_end|>" * 20,
        "\r\n\r\ndata: x\n\n",
    ],
)
@run_async
async def test_strange_text_comes_back_unharmed_by_echo_whole_and_streamed(tiny_folder: Path, text: str) -> None:
    async with open_door(tiny_folder, context_length=4096, max_request_tokens=4096) as door:
        whole = await door.complete(prompt=text, echo=True, max_tokens=0)
        streamed = await door.complete(prompt=text, echo=True, max_tokens=0, stream=True)
    assert whole.json()["choices"][0]["text"] == text
    assert "".join(event["choices"][0]["text"] for event in events(streamed.text)) == text
    assert streamed.text.isascii()


@run_async
async def test_the_most_choices_of_the_most_prompts_all_finish(tiny_folder: Path) -> None:
    async with open_door(tiny_folder) as door:
        answer = await door.complete(prompt=["Once"] * 6, n=8, max_tokens=20, ignore_eos=True, stream=True)
        reasons = [choice["finish_reason"] for event in events(answer.text) for choice in event["choices"]]
    assert len([reason for reason in reasons if reason]) == 48


@run_async
async def test_a_prompt_that_cannot_fit_is_refused_without_tokenizing_it(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_door(tiny_folder) as door:

        def never(*_: object, **__: object) -> list[int]:
            pytest.fail("it was tokenized")

        monkeypatch.setattr(door.tokenizer, "encode", never)
        error = assert_openai_error(await door.complete(prompt="a" * 90_000), 400)
    assert error["code"] == "context_length_exceeded"
    assert "at least" in error["message"]


@run_async
async def test_the_loop_goes_on_while_a_long_prompt_is_tokenized(tiny_folder: Path) -> None:
    async with open_door(tiny_folder, context_length=200_000, max_request_tokens=200_000) as door:
        working = asyncio.create_task(door.complete(prompt="Once upon 1 " * 5000, max_tokens=1))
        longest_s, before_s = 0.0, asyncio.get_running_loop().time()
        while not working.done():
            await asyncio.sleep(0)
            now_s = asyncio.get_running_loop().time()
            longest_s, before_s = max(longest_s, now_s - before_s), now_s
        assert (await working).status_code == 200
    assert longest_s < 0.5


@run_async
async def test_a_body_that_does_not_arrive_in_time_is_a_408(tiny_folder: Path) -> None:
    async def receive() -> Message:
        await asyncio.sleep(60)
        return {"type": "http.request", "body": b"", "more_body": True}

    request = Request({"type": "http", "method": "POST", "path": "/", "headers": []}, receive)
    with pytest.raises(ApiError, match=r"0\.01 s") as late:
        await read_json_object(request, 100, timeout_s=0.01)
    assert late.value.status == 408


@run_async
async def test_a_client_that_leaves_in_the_middle_of_its_body_is_forgotten(tiny_folder: Path) -> None:
    messages: list[Message] = [
        {"type": "http.request", "body": b'{"model', "more_body": True},
        {"type": "http.disconnect"},
    ]
    sent: list[Message] = []

    async def receive() -> Message:
        return messages.pop(0)

    async def send(message: Message) -> None:
        sent.append(message)

    async with open_door(tiny_folder) as door:
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "query_string": b"",
            "path": "/v1/completions", "raw_path": b"/v1/completions", "headers": [], "scheme": "http",
        }  # fmt: skip
        await door.app(scope, receive, send)
        assert door.cluster.submissions == []
    assert sent[0]["status"] == 499


@run_async
async def test_a_thousand_unknown_names_are_logged_within_bounds(
    tiny_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_door(tiny_folder) as door:
        for start in range(0, 1000, 100):
            fields: dict[str, Any] = {"x" * 200 + str(n): n for n in range(start, start + 100)}
            assert (await door.complete(**fields, max_tokens=1)).status_code == 200
    warnings = [record.getMessage() for record in caplog.records if "unknown request parameter" in record.getMessage()]
    assert 200 < len(warnings) <= 256
    assert all(len(warning) < 150 for warning in warnings)


@run_async
async def test_a_schema_of_any_depth_is_served_or_refused(tiny_folder: Path) -> None:
    forms = (
        '"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": %s}}',
        '"tool_choice": "required", "tools": [{"type": "function", "function": {"name": "f", "parameters": %s}}]',
        '"tools": [{"type": "function", "function": {"name": "f", "parameters": %s}}]',
    )
    statuses = set()
    async with open_door(tiny_folder, context_length=90_000, max_request_tokens=90_000) as door:
        for depth in (50, *range(100, 400, 50), *range(400, 500), 950):
            schema = '{"allOf": [' * depth + "{}" + "]}" * depth
            for form in forms:
                body = f'{{"model": "{MODEL}", "messages": [{{"role": "user", "content": "a"}}], "max_tokens": 5, '
                answer = await door.client.post("/v1/chat/completions", content=f"{body}{form % schema}}}")
                assert_answered(answer)
                statuses.add((depth, answer.status_code))
    assert {(50, 200), (950, 400)} <= statuses
    assert (50, 400) not in statuses


@pytest.mark.parametrize(
    ("path", "fields", "code"),
    [
        ("completions", {"prompt": [[5]] * 200_000}, None),
        ("completions", {"prompt": [5] * 200_000}, "context_length_exceeded"),
        ("completions", {"prompt": [[1], [5] * 200_000]}, "context_length_exceeded"),
        ("chat/completions", {"messages": [{}] * 200_000}, "context_length_exceeded"),
        ("completions", {"prompt": "a", **{f"k{n}": 1 for n in range(2000)}}, None),
    ],
    ids=["prompts", "ids", "ids of one", "messages", "fields"],
)
@run_async
async def test_a_flood_of_items_is_refused_by_its_length_alone(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, path: str, fields: dict[str, Any], code: str | None
) -> None:
    """To look at a million items takes seconds in which no stream gets a token."""
    for wire in (CompletionRequest, ChatCompletionRequest):
        monkeypatch.setattr(wire, "model_validate", lambda _: pytest.fail("its items were looked at"))
    async with open_door(tiny_folder, config=ServerConfig()) as door:
        answer = await door.client.post(f"/v1/{path}", json={"model": MODEL, **fields})
    assert assert_openai_error(answer, 400)["code"] == code


@run_async
async def test_grammars_that_wait_to_be_tried_hold_up_no_long_prompt(tiny_folder: Path) -> None:
    """They share threads with the tokenizer."""
    async with open_door(tiny_folder, context_length=90_000, max_request_tokens=90_000) as door:
        costly = [
            door.chat(response_format={"type": "json_schema", "json_schema": {"name": "s", "schema": schema}})
            for schema in ({"type": "integer", "multipleOf": 100_000_007 + n} for n in range(40))
        ]
        waiting = [asyncio.create_task(asking) for asking in costly]
        await asyncio.sleep(0.1)
        async with asyncio.timeout(5):
            answer = await door.complete(prompt="a " * 2_000, max_tokens=1)
        assert answer.status_code == 200
        assert not waiting[-1].done()
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
