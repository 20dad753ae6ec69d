"""Every feature of the API, as OpenAI's own client asks for it: it parses the answers, whole and streamed."""

from typing import Any

import openai

MESSAGES: list[Any] = [{"role": "user", "content": "Tell me of the sea."}]
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "parameters": {
                "type": "object",
                "properties": {"where": {"enum": ["sea", "river"]}},
                "required": ["where"],
                "additionalProperties": False,
            },
        },
    }
]
SCHEMA: Any = {
    "type": "json_schema",
    "json_schema": {"name": "n", "schema": {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"],
                                            "additionalProperties": False}},
}  # fmt: skip
CHATS: list[dict[str, Any]] = [
    {"n": 2, "logprobs": True, "top_logprobs": 3, "presence_penalty": 0.5, "logit_bias": {"40": -100}},
    {"response_format": SCHEMA},
    {"response_format": {"type": "json_object"}, "frequency_penalty": 0.2},
    {"tools": TOOLS, "tool_choice": "required", "max_completion_tokens": 300, "parallel_tool_calls": False},
    {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "look"}}, "max_completion_tokens": 300},
    {"tools": TOOLS, "tool_choice": "auto", "stop": ["q", "zz"], "top_p": 0.9},
]
COMPLETIONS: list[dict[str, Any]] = [
    {"echo": True, "logprobs": 2, "max_tokens": 5},
    {"echo": True, "logprobs": 0, "max_tokens": 0},
    {"prompt": [[8, 9], [5, 6, 7]], "n": 2, "best_of": 3, "max_tokens": 6},
    {"stop": "e", "presence_penalty": 1, "extra_body": {"min_p": 0.05, "min_tokens": 3, "repetition_penalty": 1.2}},
    {"stop": ["e", "s"], "extra_body": {"include_stop_str_in_output": True, "top_k": 30}},
    {"prompt": ["the sea", "the river"], "n": 2, "logprobs": 1, "user": "somebody"},
    {"prompt": [8, 9, 10], "temperature": 0, "extra_body": {"ignore_eos": True, "priority": 3}},
    {"prompt": ["the sea", "the river"], "echo": True, "logprobs": 1, "max_tokens": 4},
    {"top_p": 0.7, "frequency_penalty": 1.5, "logit_bias": {"104": 5}, "extra_body": {"stop_token_ids": [105, 106]}},
]


async def drive(client: openai.AsyncOpenAI, model: str) -> list[dict[str, Any]]:
    """What every feature answers, choice by choice, without ids; streams must tell the same."""
    found: list[dict[str, Any]] = []
    for wanted in CHATS:
        fields = {"max_completion_tokens": 60, **wanted}
        chat = await client.chat.completions.create(model=model, messages=MESSAGES, seed=2, **fields)
        found += [_without_ids(choice.model_dump()) for choice in chat.choices]
        streamed = await client.chat.completions.create(
            model=model, messages=MESSAGES, seed=2, stream=True,
            stream_options={"include_usage": True}, **fields,
        )  # fmt: skip
        said = ["" for _ in chat.choices]
        usages = []
        async for chunk in streamed:
            usages.append(chunk.usage)
            for choice in chunk.choices:
                said[choice.index] += choice.delta.content or ""
        assert said == [choice.message.content or "" for choice in chat.choices]
        # Not cached_tokens: the second time the prompt is in the cache.
        last = usages.pop()
        assert last is not None
        assert chat.usage is not None
        assert last.total_tokens == chat.usage.total_tokens
        assert set(usages) == {None}
    for fields in COMPLETIONS:
        asked = {"model": model, "prompt": "Once upon", "seed": 2, **fields}
        answer = await client.completions.create(**asked)
        found += [choice.model_dump() for choice in answer.choices]
        if "best_of" not in asked:
            await _check_streamed(client, asked, answer)
    return found


def _without_ids(choice: dict[str, Any]) -> dict[str, Any]:
    """A call's id is made of its request's."""
    calls = choice["message"]["tool_calls"] or []
    assert all(call.pop("id").startswith("call_") for call in calls)
    return choice


async def _check_streamed(client: openai.AsyncOpenAI, asked: dict[str, Any], whole: Any) -> None:
    """The pieces of a streamed completion are the whole one's text, logprobs and endings."""
    texts = [""] * len(whole.choices)
    reasons: list[list[str]] = [[] for _ in whole.choices]
    scores: list[dict[str, list[Any]]] = [{} for _ in whole.choices]
    streamed = await client.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    usage = None
    async for chunk in streamed:
        assert usage is None, "usage comes last"
        usage = chunk.usage
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            reasons[choice.index] += [choice.finish_reason] if choice.finish_reason else []
            for name, values in (choice.logprobs.model_dump() if choice.logprobs else {}).items():
                scores[choice.index].setdefault(name, []).extend(values)
    assert texts == [choice.text for choice in whole.choices]
    assert reasons == [[choice.finish_reason] for choice in whole.choices]
    assert scores == [choice.logprobs.model_dump() if choice.logprobs else {} for choice in whole.choices]
    assert usage is not None
    assert usage.total_tokens == whole.usage.total_tokens
