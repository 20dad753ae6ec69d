"""POST /v1/chat/completions, whole and streamed."""

from pathlib import Path

import pytest

from tests.fakes.door import CONTEXT_LENGTH, MODEL, open_door, run_async
from tests.fakes.scheduler_endpoint import spoken_tokens
from tests.fakes.tiny_tokenizer import EOS_TOKEN_ID
from tests.integration.door.sse import events


@run_async
async def test_a_chat_answer_has_every_field_that_clients_read(tiny_folder: Path) -> None:
    async with open_door(tiny_folder) as door:
        words = door.tokenizer.encode("A story.")
        door.cluster.draw = spoken_tokens([*words, EOS_TOKEN_ID])
        answer = (await door.chat("Tell me")).json()
        spec = door.cluster.submissions[0][0]
        prompt = door.tokenizer.decode_verbatim(spec.prompt_token_ids)
    assert prompt == (
        "<|im_start|>system\nYou are helpful.<|im_end|>\n<|im_start|>user\nTell me<|im_end|>\n<|im_start|>assistant\n"
    )
    assert answer == {
        "id": "chatcmpl-id2",
        "object": "chat.completion",
        "created": 1_700_000_000,
        "model": MODEL,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "A story.", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": len(spec.prompt_token_ids),
            "completion_tokens": len(words) + 1,
            "total_tokens": len(spec.prompt_token_ids) + len(words) + 1,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }


@run_async
async def test_omitted_max_tokens_is_the_rest_of_the_context(tiny_folder: Path) -> None:
    async with open_door(tiny_folder) as door:
        usage = (await door.chat(ignore_eos=True)).json()["usage"]
    assert usage["total_tokens"] == CONTEXT_LENGTH


@run_async
async def test_the_rest_of_the_context_never_exceeds_what_a_worker_can_hold(tiny_folder: Path) -> None:
    async with open_door(tiny_folder, max_request_tokens=80) as door:
        usage = (await door.chat(ignore_eos=True)).json()["usage"]
    assert usage["total_tokens"] == 80


@run_async
async def test_max_completion_tokens_wins_over_max_tokens(tiny_folder: Path) -> None:
    async with open_door(tiny_folder) as door:
        usage = (await door.chat(ignore_eos=True, max_tokens=9, max_completion_tokens=3)).json()["usage"]
    assert usage["completion_tokens"] == 3


@run_async
async def test_message_content_may_be_parts_and_developer_means_system(tiny_folder: Path) -> None:
    async with open_door(tiny_folder) as door:
        parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
        messages = [
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": parts},
            # As clients send an earlier answer back.
            {"role": "assistant", "content": "three", "refusal": None, "tool_calls": None, "annotations": []},
            {"role": "user", "content": "four"},
        ]
        body = {"model": MODEL, "messages": messages, "max_tokens": 1}
        answer = await door.client.post("/v1/chat/completions", json=body)
        prompt = door.tokenizer.decode_verbatim(door.cluster.submissions[0][0].prompt_token_ids)
    assert answer.status_code == 200
    assert prompt == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\none\ntwo<|im_end|>\n"
        "<|im_start|>assistant\nthree<|im_end|>\n<|im_start|>user\nfour<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("n", [1, 3])
@run_async
async def test_a_chat_stream_carries_the_role_once_and_joins_to_the_whole(tiny_folder: Path, n: int) -> None:
    async with open_door(tiny_folder) as door:
        whole = (await door.chat(n=n, seed=4, max_tokens=30, ignore_eos=True)).json()
        found = events((await door.chat(n=n, seed=4, max_tokens=30, ignore_eos=True, stream=True)).text)
    texts, reasons = [""] * n, [0] * n
    seen: set[int] = set()
    for event in found:
        assert event["object"] == "chat.completion.chunk"
        assert event["id"] == found[0]["id"]
        (choice,) = event["choices"]
        index, delta = choice["index"], choice["delta"]
        assert ("role" in delta) == (index not in seen)
        seen.add(index)
        texts[index] += delta.get("content", "")
        reasons[index] += choice["finish_reason"] == "length"
    assert texts == [choice["message"]["content"] for choice in whole["choices"]]
    assert reasons == [1] * n


@run_async
async def test_a_first_token_that_ends_the_chat_is_an_empty_answer(tiny_folder: Path) -> None:
    async with open_door(tiny_folder) as door:
        door.cluster.draw = spoken_tokens([EOS_TOKEN_ID])
        whole = (await door.chat()).json()
        found = events((await door.chat(stream=True)).text)
    assert whole["choices"][0]["message"]["content"] == ""
    assert [choice["choices"][0]["delta"] for choice in found] == [{"role": "assistant", "content": ""}, {}]
    assert found[-1]["choices"][0]["finish_reason"] == "stop"
