"""What a client is told when something is wrong before the first event."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from scheduler.messages import ErrorKind
from tests.fakes.door import CONTEXT_LENGTH, MODEL, VOCAB_SIZE, Door, open_door, run_async


def assert_openai_error(answer: httpx.Response, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    body = answer.json()
    assert set(body) == {"error"}
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert error["message"]
    return error


async def assert_lives(door: Door) -> None:
    assert (await door.complete(max_tokens=1)).status_code == 200


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", ""]}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": 7}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [1, True]}, "prompt"),
        ({"prompt": [1.5]}, "prompt"),
        ({"prompt": [[1], "a"]}, "prompt"),
        ({"prompt": [VOCAB_SIZE]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [10**40]}, "prompt"),
        ({"prompt": ["a"] * 7}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": "1"}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"n": 9}, "n"),
        ({"n": 10**30}, "n"),
        ({"best_of": 9}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"n": 2, "best_of": 1}, "best_of"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 1.01}, "top_p"),
        ({"top_p": -1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"seed": 2**64}, "seed"),
        ({"seed": "x"}, "seed"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", ""]}, "stop"),
        ({"stop": ["a"] * 5}, "stop"),
        ({"stop": 5}, "stop"),
        ({"stop": [5]}, "stop"),
        ({"stop": "x" * 2000}, "stop"),
        ({"stop_token_ids": [VOCAB_SIZE]}, "stop_token_ids"),
        ({"stop_token_ids": "a"}, "stop_token_ids"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids[0]"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"stream": True, "stream_options": []}, "stream_options"),
        ({"priority": 2**40}, "priority"),
        ({"echo": "yes"}, "echo"),
        ({"model": None}, "model"),
        ({"model": 5}, "model"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"repetition_penalty": 5e-324}, "repetition_penalty"),
        ({"repetition_penalty": 1e300}, "repetition_penalty"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {str(VOCAB_SIZE): 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias[5]"),
        ({"logit_bias": [5]}, "logit_bias"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 17}, "min_tokens"),
        ({"logprobs": -1}, "logprobs"),
        ({"logprobs": 21}, "logprobs"),
        # not served yet, and would change the answer
        ({"suffix": "x"}, "suffix"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"guided_json": {}}, "guided_json"),
    ],
)
@run_async
async def test_a_value_that_cannot_be_served_is_a_400_that_names_it(
    tiny_folder: Path, fields: dict[str, Any], param: str
) -> None:
    async with open_door(tiny_folder) as door:
        error = assert_openai_error(await door.complete(**fields), 400)
        assert door.cluster.submissions == []
        await assert_lives(door)
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert param.split("[")[0].split(".")[-1] in error["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "tool", "tool_call_id": "1"}]}, "messages[0].content"),
        ({"messages": [{"content": "a"}]}, "messages[0].role"),
        (
            {"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]},
            "messages[0].tool_calls[0].function",
        ),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"logprobs": 1}, "logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "often"}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}}, "response_format"),
        ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos"),
        ({"echo": True}, "echo"),
    ],
)
@run_async
async def test_a_chat_that_cannot_be_served_is_a_400_that_names_it(
    tiny_folder: Path, fields: dict[str, Any], param: str
) -> None:
    async with open_door(tiny_folder) as door:
        error = assert_openai_error(await door.chat(**fields), 400)
        assert door.cluster.submissions == []
    assert error["param"] == param


@run_async
async def test_neutral_values_of_unsupported_parameters_and_nulls_are_accepted(tiny_folder: Path) -> None:
    nulls = dict.fromkeys(
        ["n", "stop", "seed", "temperature", "top_p", "stream", "stream_options", "logprobs", "logit_bias", "echo",
         "suffix", "best_of", "user", "top_k", "min_p", "stop_token_ids", "priority", "ignore_eos"]
    )  # fmt: skip
    neutral = {"presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}, "best_of": 2, "n": 2}
    chat: dict[str, Any] = {"logprobs": False, "tools": [], "tool_choice": "none", "response_format": {"type": "text"}}
    async with open_door(tiny_folder) as door:
        assert (await door.complete(**nulls)).status_code == 200
        assert (await door.complete(**neutral)).status_code == 200
        assert (await door.chat(**chat)).status_code == 200


@run_async
async def test_unknown_fields_are_ignored_with_one_warning(tiny_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with open_door(tiny_folder) as door:
        for _ in range(3):
            assert (await door.complete(frobnicate=1, user="me", max_tokens=1)).status_code == 200
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warnings == ["unknown request parameter 'frobnicate' is ignored"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[1]",
        b'"text"',
        b"null",
        b"\xff\xfe{}",
        b'{"model": "tiny", "prompt": "\xff"}',
        b'{"model": "tiny", "prompt": "\\ud800"}',
        b'{"model": "tiny", "prompt": "a", "temperature": NaN}',
        b'{"model": "tiny", "prompt": "a", "temperature": 1e999}',
        b'{"model": "tiny", "prompt": "a", "n": ' + b"1" * 5000 + b"}",
        b'{"a":' * 12_000 + b"1" + b"}" * 12_000,
        b"[" * 90_000,
        b"prompt=a&model=tiny",
    ],
)
@run_async
async def test_a_body_that_is_no_json_object_is_a_400(tiny_folder: Path, body: bytes) -> None:
    async with open_door(tiny_folder) as door:
        for path in ("/v1/completions", "/v1/chat/completions"):
            assert_openai_error(await door.client.post(path, content=body), 400)
        await assert_lives(door)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@run_async
async def test_a_body_above_the_limit_is_a_413_announced_or_not(tiny_folder: Path, path: str) -> None:
    body = json.dumps({"model": MODEL, "prompt": "a" * 100_000, "messages": []}).encode()

    async def in_chunks() -> AsyncIterator[bytes]:
        for start in range(0, len(body), 10_000):
            yield body[start : start + 10_000]

    async with open_door(tiny_folder) as door:
        for content in (body, in_chunks()):
            error = assert_openai_error(await door.client.post(path, content=content), 413)
            assert "100000 bytes" in error["message"]
        await assert_lives(door)


@run_async
async def test_a_wrong_content_length_does_not_get_around_the_limit(tiny_folder: Path) -> None:
    async with open_door(tiny_folder) as door:
        for length in ("5", "-1", "9" * 30, "x"):
            answer = await door.client.post(
                "/v1/completions", content=b" " * 100_001, headers={"Content-Length": length}
            )
            assert_openai_error(answer, 413)


@run_async
async def test_an_unknown_model_is_a_404(tiny_folder: Path) -> None:
    async with open_door(tiny_folder) as door:
        for answer in (
            await door.complete(model="gpt-4"),
            await door.chat(model="gpt-4"),
            await door.client.get("/v1/models/gpt-4"),
        ):
            error = assert_openai_error(answer, 404)
            assert (error["code"], error["param"]) == ("model_not_found", "model")


@run_async
async def test_an_overlong_request_is_told_the_numbers(tiny_folder: Path) -> None:
    async with open_door(tiny_folder) as door:
        prompt = [5] * 100
        fits = await door.complete(prompt=prompt, max_tokens=28, ignore_eos=True)
        assert fits.json()["usage"]["total_tokens"] == CONTEXT_LENGTH
        for fields, numbers in (
            ({"prompt": prompt, "max_tokens": 29}, ("128", "129", "100", "29")),
            ({"prompt": [5] * 128}, ("128",)),
            ({"prompt": [5] * 500, "max_tokens": 1}, ("128", "500")),
            ({"prompt": prompt, "max_tokens": 10**20}, ("128", "100")),
        ):
            error = assert_openai_error(await door.complete(**fields), 400)
            assert error["code"] == "context_length_exceeded"
            assert all(number in error["message"] for number in numbers)
        long_chat = await door.chat("word " * 200)
        assert assert_openai_error(long_chat, 400)["code"] == "context_length_exceeded"


@run_async
async def test_an_omitted_max_tokens_is_shortened_to_the_context(tiny_folder: Path) -> None:
    async with open_door(tiny_folder) as door:
        answer = await door.complete(prompt=[5] * 120, ignore_eos=True)
    assert answer.json()["usage"]["completion_tokens"] == 8


@pytest.mark.parametrize(
    ("kind", "status", "kind_of_error", "has_retry_after"),
    [
        (ErrorKind.INVALID, 400, "invalid_request_error", False),
        (ErrorKind.NEVER_FITS, 400, "invalid_request_error", False),
        (ErrorKind.QUEUE_FULL, 429, "rate_limit_error", True),
        (ErrorKind.NO_WORKER, 503, "server_error", True),
        (ErrorKind.WORKER_LOST, 503, "server_error", True),
        (ErrorKind.DEADLINE, 504, "server_error", False),
        (ErrorKind.ENGINE, 500, "server_error", False),
        (ErrorKind.TRANSFER, 500, "server_error", False),
        (ErrorKind.INTERNAL, 500, "server_error", False),
    ],
)
@pytest.mark.parametrize("is_stream", [False, True])
@run_async
async def test_a_refusal_has_its_true_status(
    tiny_folder: Path, kind: ErrorKind, status: int, kind_of_error: str, has_retry_after: bool, is_stream: bool
) -> None:
    async with open_door(tiny_folder) as door:
        door.cluster.refusals = [kind]
        answer = await door.complete(n=2, stream=is_stream)
        error = assert_openai_error(answer, status)
        assert (error["type"], error["code"]) == (kind_of_error, kind.value)
        assert ("retry-after" in answer.headers) == has_retry_after
        await assert_lives(door)


@run_async
async def test_paths_and_methods_that_do_not_exist_have_openai_bodies(tiny_folder: Path) -> None:
    async with open_door(tiny_folder) as door:
        for path in ("/", "/v1", "/v1/embeddings", "/v1/models/", "/docs", "/requests/none"):
            assert_openai_error(await door.client.get(path), 404)
        answer = await door.client.get("/v1/completions")
        assert_openai_error(answer, 405)
        assert answer.headers["allow"] == "POST"
        assert_openai_error(await door.client.post("/health"), 405)


@run_async
async def test_a_bug_is_a_500_without_details(
    tiny_folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_door(tiny_folder) as door:

        def broken(*_: object) -> int:
            msg = "secret detail"
            raise RuntimeError(msg)

        monkeypatch.setattr(door.frontend, "_seed_source", broken)
        error = assert_openai_error(await door.complete(), 500)
    assert "secret" not in error["message"]
    assert "secret detail" in caplog.text
