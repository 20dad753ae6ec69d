"""Logprobs and echo of both endpoints, by a real model: right, complete, and the same wherever it runs."""

import math
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.fakes.door import run_async
from tests.fakes.served_cluster import Serve

PROMPT = "Once upon a time there was a river, and " * 3


def _reference(model_folder: Path, token_ids: list[int]) -> list[list[float]]:
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    with torch.inference_mode():
        logits = model(torch.tensor([token_ids])).logits[0]
    found: list[list[float]] = logits.double().log_softmax(-1).tolist()
    return found


@run_async
async def test_a_prompt_is_scored_as_transformers_scores_it(served: Serve, model_folder: Path) -> None:
    async with served() as cluster:
        token_ids = cluster.frontend.tokenizer.encode(PROMPT)
        answer = await cluster.complete(PROMPT, echo=True, max_tokens=0, logprobs=3)
    choice = answer["choices"][0]
    scores = choice["logprobs"]
    assert choice["text"] == "".join(scores["tokens"]) == PROMPT
    assert choice["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 0
    assert scores["token_logprobs"][0] is scores["top_logprobs"][0] is None
    expected = _reference(model_folder, token_ids)
    for position in range(1, len(token_ids)):
        found = scores["token_logprobs"][position]
        assert math.isclose(found, expected[position - 1][token_ids[position]], abs_tol=1e-4)
        top = scores["top_logprobs"][position]
        assert math.isclose(max(top.values()), max(expected[position - 1]), abs_tol=1e-4)
        assert 3 <= len(top) <= 4
        assert top[scores["tokens"][position]] == found
    assert scores["text_offset"] == list(range(len(PROMPT)))


@run_async
async def test_generated_tokens_come_with_as_many_logprobs(served: Serve, model_folder: Path) -> None:
    async with served() as cluster:
        tokenizer = cluster.frontend.tokenizer
        fields: dict[str, Any] = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}
        answer = await cluster.complete(PROMPT, echo=True, logprobs=1, **fields)
        chat = await cluster.chat("Hi", logprobs=True, top_logprobs=2, max_tokens=9, ignore_eos=True)
    scores = answer["choices"][0]["logprobs"]
    num_prompt_tokens = len(tokenizer.encode(PROMPT))
    assert len(scores["token_logprobs"]) == num_prompt_tokens + 12 == len(scores["text_offset"])
    # Greedy: each generated token is the best one.
    for top, found in zip(scores["top_logprobs"][-12:], scores["token_logprobs"][-12:], strict=True):
        assert max(top.values()) == found
    content = chat["choices"][0]["logprobs"]["content"]
    assert len(content) == 9 == chat["usage"]["completion_tokens"]
    for entry in content:
        assert len(entry["top_logprobs"]) == 2
        assert entry["top_logprobs"][0]["logprob"] >= entry["top_logprobs"][1]["logprob"]
        assert bytes(entry["bytes"]).decode(errors="replace") == entry["token"] or entry["token"].startswith("\\x")


@run_async
async def test_mixed_and_disaggregated_logprobs_are_the_same_bits_streamed_or_not(served: Serve) -> None:
    fields: dict[str, Any] = {"echo": True, "logprobs": 2, "max_tokens": 8, "seed": 5, "ignore_eos": True}
    answers = []
    for mixed in (False, True):
        async with served(mixed=mixed) as cluster:
            # Twice: the prompt is scored in full although its blocks are cached by now.
            answers += [(await cluster.complete(PROMPT, **fields))["choices"][0] for _ in range(2)]
            events = await cluster.events("/v1/completions", prompt=PROMPT, **fields)
            parts = [event["choices"][0] for event in events]
            scores = [part["logprobs"] for part in parts if part["logprobs"]]
            answers.append(
                {
                    "index": 0,
                    "text": "".join(part["text"] for part in parts),
                    "logprobs": {
                        name: list(chain.from_iterable(score[name] for score in scores)) for name in scores[0]
                    },
                    "finish_reason": parts[-1]["finish_reason"],
                }
            )
    assert all(answer == answers[0] for answer in answers)


@pytest.mark.parametrize("losses", [[1], [3, 7], [1, 2, 3]])
@run_async
async def test_lost_attempts_leave_logprobs_as_they_are(served: Serve, losses: list[int]) -> None:
    fields: dict[str, Any] = {"echo": True, "logprobs": 2, "max_tokens": 10, "seed": 5, "ignore_eos": True}
    async with served() as cluster:
        expected = await cluster.complete(PROMPT, **fields)
        cluster.lose_after += losses
        found = await cluster.complete(PROMPT, **fields)
        assert cluster.frontend.counters()["resubmissions"] == len(losses)
    assert found["choices"] == expected["choices"]


@run_async
async def test_a_scored_prompt_is_not_shared_through_the_cache(served: Serve) -> None:
    async with served(mixed=True) as cluster:
        await cluster.complete(PROMPT, max_tokens=2)
        answer = await cluster.complete(PROMPT, max_tokens=2, echo=True, logprobs=0)
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert all(len(top) == 1 for top in answer["choices"][0]["logprobs"]["top_logprobs"][1:])


@run_async
async def test_bad_logprobs_are_refused(served: Serve) -> None:
    async with served() as cluster:
        for path, fields in (
            ("/v1/completions", {"prompt": "a", "logprobs": 21}),
            ("/v1/completions", {"prompt": "a", "logprobs": True}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "top_logprobs": 2}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "logprobs": 1}),
        ):
            answer = await cluster.client.post(path, json={"model": "tiny", **fields})
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] in ("logprobs", "top_logprobs")
