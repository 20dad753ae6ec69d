"""JSON, schemas and tool calls, drawn by a random model that would never write them by itself."""

import asyncio
import json
from typing import Any

import pytest

from serving.grammar import GrammarError, GrammarState
from tests.fakes.door import run_async
from tests.fakes.served_cluster import Serve

SCHEMA = {
    "type": "object",
    "properties": {"count": {"type": "integer", "maximum": 99}, "kind": {"enum": ["river", "sea"]}},
    "required": ["count", "kind"],
    "additionalProperties": False,
}
AS_SCHEMA: dict[str, Any] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
TOOLS = [
    {"type": "function", "function": {"name": "look", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "wait"}},
]
FIELDS: dict[str, Any] = {"seed": 4, "max_completion_tokens": 300}


def _check(text: str) -> None:
    document = json.loads(text)
    assert set(document) == {"count", "kind"}
    assert isinstance(document["count"], int)
    assert document["kind"] in ("river", "sea")


@run_async
async def test_a_schema_is_followed_alike_mixed_disaggregated_streamed_and_after_losses(served: Serve) -> None:
    answers = []
    for mixed in (False, True):
        async with served(mixed=mixed) as cluster:
            answers.append(await cluster.chat("Count.", response_format=AS_SCHEMA, logprobs=True, **FIELDS))
            cluster.lose_after += [1, 5, 9]
            answers.append(await cluster.chat("Count.", response_format=AS_SCHEMA, logprobs=True, **FIELDS))
            assert cluster.frontend.counters()["resubmissions"] == 3
            events = await cluster.events(
                "/v1/chat/completions",
                messages=[{"role": "user", "content": "Count."}],
                response_format=AS_SCHEMA,
                **FIELDS,
            )
            streamed = "".join(event["choices"][0]["delta"].get("content") or "" for event in events)
            assert streamed == answers[0]["choices"][0]["message"]["content"]
    assert answers[0]["choices"][0]["finish_reason"] == "stop"
    _check(answers[0]["choices"][0]["message"]["content"])
    assert all(answer["choices"] == answers[0]["choices"] for answer in answers)


@run_async
async def test_json_object_is_an_object_unless_the_length_cuts_it(served: Serve) -> None:
    async with served() as cluster:
        answer = await cluster.chat("Count.", response_format={"type": "json_object"}, n=3, **FIELDS)
    for choice in answer["choices"]:
        if choice["finish_reason"] == "stop":
            assert isinstance(json.loads(choice["message"]["content"]), dict)
        assert choice["message"]["content"].startswith("{")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "look"}}])
@run_async
async def test_a_call_that_must_be_made_is_made(served: Serve, choice: object) -> None:
    fields = {**FIELDS, "tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False}
    async with served() as cluster:
        answer = (await cluster.chat("Look.", **fields))["choices"][0]
        events = await cluster.events("/v1/chat/completions", messages=[{"role": "user", "content": "Look."}], **fields)
    message = answer["message"]
    assert answer["finish_reason"] == "tool_calls"
    assert message["content"] is None
    (call,) = message["tool_calls"]
    assert call["function"]["name"] in ("look", "wait")
    if call["function"]["name"] == "look":
        _check(call["function"]["arguments"])
    streamed = [found for event in events for found in event["choices"][0]["delta"].get("tool_calls", ())]
    assert [found["function"] for found in streamed] == [call["function"]]
    assert streamed[0]["index"] == 0
    assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"


@run_async
async def test_a_conversation_with_calls_and_results_goes_on(served: Serve) -> None:
    async with served() as cluster:
        messages = [
            {"role": "user", "content": "Look."},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"count": 1}'}}
                ],
            },
            {"role": "tool", "tool_call_id": "call_1", "content": "a river"},
        ]
        events = await cluster.events("/v1/chat/completions", messages=messages, tools=TOOLS, max_tokens=4, seed=1)
        prompt = cluster.frontend.tokenizer.decode_verbatim(cluster.submissions[0].prompt_token_ids)
    assert events
    assert "a river" in prompt
    assert '{"name": "look", "arguments": {"count": 1}}' in prompt


@pytest.mark.parametrize("breaks_at", [0, 6])
@run_async
async def test_a_grammar_that_breaks_in_mid_stream_ends_its_own_request_only(
    served: Serve, monkeypatch: pytest.MonkeyPatch, breaks_at: int
) -> None:
    allowed = GrammarState.allowed

    def breaking(state: GrammarState) -> Any:
        if state.num_read == breaks_at:
            msg = "too complex"
            raise GrammarError(msg)
        return allowed(state)

    monkeypatch.setattr(GrammarState, "allowed", breaking)
    async with served() as cluster:
        beside = asyncio.create_task(cluster.complete("Once", max_tokens=20, ignore_eos=True))
        body = {"messages": [{"role": "user", "content": "a"}], "response_format": AS_SCHEMA, **FIELDS}
        broken = await cluster.client.post("/v1/chat/completions", json={"model": "tiny", **body})
        assert broken.status_code == 400
        assert "too complex" in broken.json()["error"]["message"]
        assert (await beside)["usage"]["completion_tokens"] == 20
