"""Kind E, streaming: as many logprobs as tokens, and usage only where it was asked for."""

from pathlib import Path
from typing import Any

import pytest

from tests.fakes.door import run_async
from tests.fakes.served_cluster import ServedCluster, serve, small_config
from tests.fakes.tiny_model import write_tiny_model

NUM_TOKENS = 7
CHAT = "/v1/chat/completions"
COMPLETION = "/v1/completions"


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


async def _streamed(cluster: ServedCluster, path: str, **fields: Any) -> list[dict[str, Any]]:
    asked: dict[str, Any] = {"seed": 1, "max_tokens": NUM_TOKENS, "ignore_eos": True}
    asked |= {"messages": [{"role": "user", "content": "sea"}]} if path == CHAT else {"prompt": "sea"}
    return await cluster.events(path, **asked, **fields)


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("losses", [[], [1], [3]])
@run_async
async def test_e05_there_are_as_many_logprobs_as_completion_tokens_the_first_included(
    model_folder: Path, tmp_path: Path, mixed: bool, losses: list[int]
) -> None:
    async with serve(small_config(mixed=mixed), model_folder, tmp_path) as cluster:
        cluster.lose_after += losses
        fields = {"seed": 1, "max_tokens": NUM_TOKENS, "ignore_eos": True}
        completion = await cluster.complete("sea", logprobs=1, **fields)
        chat = await cluster.chat("sea", logprobs=True, top_logprobs=1, **fields)
        completed = await _streamed(cluster, COMPLETION, logprobs=1)
        chatted = await _streamed(cluster, CHAT, logprobs=True, top_logprobs=1)
        one = await cluster.complete("sea", logprobs=1, seed=1, max_tokens=1, ignore_eos=True)
    scores = completion["choices"][0]["logprobs"]
    assert {name: len(scores[name]) for name in scores} == dict.fromkeys(scores, NUM_TOKENS)
    assert completion["usage"]["completion_tokens"] == NUM_TOKENS
    assert len(chat["choices"][0]["logprobs"]["content"]) == NUM_TOKENS == chat["usage"]["completion_tokens"]
    parts = [event["choices"][0]["logprobs"] for event in completed]
    assert [found for part in parts if part for found in part["token_logprobs"]] == scores["token_logprobs"]
    said = [event["choices"][0]["logprobs"] for event in chatted]
    assert [entry for part in said if part for entry in part["content"]] == chat["choices"][0]["logprobs"]["content"]
    # A request that its first token finishes is never transferred, and is scored all the same.
    assert one["choices"][0]["logprobs"]["token_logprobs"] == scores["token_logprobs"][:1]


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("path", [COMPLETION, CHAT])
@run_async
async def test_e10_the_usage_chunk_comes_only_when_asked_for_last_and_without_choices(
    model_folder: Path, tmp_path: Path, mixed: bool, path: str
) -> None:
    async with serve(small_config(mixed=mixed), model_folder, tmp_path) as cluster:
        cluster.lose_after += [2]
        asked = await _streamed(cluster, path, stream_options={"include_usage": True}, n=2)
        unasked = [
            await _streamed(cluster, path, n=2),
            await _streamed(cluster, path, n=2, stream_options={"include_usage": False}),
            await _streamed(cluster, path, n=2, stream_options=None),
        ]
    *before, last = asked
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 2 * NUM_TOKENS
    assert last["usage"]["total_tokens"] == last["usage"]["prompt_tokens"] + 2 * NUM_TOKENS
    assert all(event["usage"] is None and event["choices"] for event in before)
    for events in unasked:
        assert all(event["choices"] and "usage" not in event for event in events)
