"""Penalties, biases and min_tokens end to end: they act, and a resumed or moved request draws the same."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.fakes.door import run_async
from tests.fakes.served_cluster import Serve, ServedCluster

PROMPT = "the sea and the river and the sea"
PENALISED: dict[str, Any] = {
    "max_tokens": 24,
    "seed": 3,
    "ignore_eos": True,
    "presence_penalty": 0.7,
    "frequency_penalty": 0.9,
    "repetition_penalty": 1.3,
    "min_p": 0.01,
    "logit_bias": {"40": 3, "41": -100},
    "logprobs": 1,
}


async def _generated(cluster: ServedCluster, **fields: Any) -> list[int]:
    """Tokens of a greedy completion (the tiny tokenizer has one per byte)."""
    answer = await cluster.complete(PROMPT, temperature=0, ignore_eos=True, logprobs=0, **fields)
    pieces = answer["choices"][0]["logprobs"]["tokens"]
    token_bytes = cluster.frontend.tokenizer.token_bytes
    by_text = {
        (raw.decode() if raw.isascii() else "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)): token_id
        for token_id in range(300)
        if (raw := token_bytes.verbatim_piece(token_id))
    }
    return [by_text[piece] for piece in pieces]


def _expected(model_folder: Path, prompt_ids: list[int], num_tokens: int) -> list[int]:
    """Greedy with all three penalties, written out plainly over transformers' logits."""
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    generated: list[int] = []
    for _ in range(num_tokens):
        with torch.inference_mode():
            row = model(torch.tensor([prompt_ids + generated])).logits[0, -1].double().tolist()
        counts = Counter(generated)
        for token_id in {*prompt_ids, *generated}:
            row[token_id] = row[token_id] / 1.2 if row[token_id] > 0 else row[token_id] * 1.2
        for token_id, count in counts.items():
            row[token_id] -= 0.4 * count + 0.3
        # Ids without text in the tiny tokenizer are kept out on both sides.
        generated.append(max(range(259), key=row.__getitem__))
    return generated


@run_async
async def test_penalties_count_generated_tokens_and_repetition_the_prompt_too(
    served: Serve, model_folder: Path
) -> None:
    async with served() as cluster:
        found = await _generated(
            cluster,
            max_tokens=20,
            presence_penalty=0.3,
            frequency_penalty=0.4,
            repetition_penalty=1.2,
            logit_bias={str(token_id): -100 for token_id in range(259, 300)},
        )
        prompt_ids = cluster.frontend.tokenizer.encode(PROMPT)
    assert found == _expected(model_folder, prompt_ids, 20)


@run_async
async def test_a_mixed_worker_draws_the_same_tokens_under_every_parameter(served: Serve) -> None:
    answers = []
    for mixed in (False, True):
        async with served(mixed=mixed) as cluster:
            answers.append((await cluster.complete(PROMPT, **PENALISED, n=2))["choices"])
            plain = await cluster.complete(PROMPT, max_tokens=24, seed=3, ignore_eos=True, n=2)
    assert answers[0] == answers[1]
    assert [choice["text"] for choice in plain["choices"]] != [choice["text"] for choice in answers[0]]


@pytest.mark.parametrize("losses", [[1], [6, 13]])
@run_async
async def test_tokens_of_a_lost_attempt_still_count_as_generated(served: Serve, losses: list[int]) -> None:
    async with served() as cluster:
        expected = await cluster.complete(PROMPT, **PENALISED, min_tokens=20)
        cluster.lose_after += losses
        found = await cluster.complete(PROMPT, **PENALISED, min_tokens=20)
        assert cluster.frontend.counters()["resubmissions"] == len(losses)
    assert found["choices"] == expected["choices"]
    assert found["usage"]["prompt_tokens"] == expected["usage"]["prompt_tokens"]


@run_async
async def test_a_bias_decides_what_is_drawn(served: Serve) -> None:
    async with served() as cluster:
        (letter,) = cluster.frontend.tokenizer.encode("x")
        answer = await cluster.complete(PROMPT, max_tokens=5, logit_bias={str(letter): 100})
    assert answer["choices"][0]["text"] == "xxxxx"


@run_async
async def test_nothing_ends_a_stream_before_min_tokens(served: Serve) -> None:
    async with served() as cluster:
        (letter,) = cluster.frontend.tokenizer.encode("x")
        (end,) = cluster.frontend.settings.eos_token_ids
        ends_at_once = {"logit_bias": {str(end): 100, str(letter): 90}, "temperature": 0, "max_tokens": 9}
        empty = await cluster.complete(PROMPT, **ends_at_once)
        late = await cluster.complete(PROMPT, **ends_at_once, min_tokens=4)
        only_x = {"logit_bias": {str(letter): 100}, "max_tokens": 9, "stop": "xxx"}
        stopped = await cluster.complete(PROMPT, **only_x)
        stopped_late = await cluster.complete(PROMPT, **only_x, min_tokens=5)
        by_token = await cluster.complete(PROMPT, **ends_at_once, min_tokens=4, stop_token_ids=[letter])
    assert [answer["choices"][0]["text"] for answer in (empty, late)] == ["", "xxxx"]
    assert late["usage"]["completion_tokens"] == 5
    # Stop strings that the first five tokens complete do not count; the sixth completes another.
    assert [answer["choices"][0]["text"] for answer in (stopped, stopped_late)] == ["", "xxx"]
    assert stopped_late["usage"]["completion_tokens"] == 6
    assert "x" not in by_token["choices"][0]["text"]
    assert {answer["choices"][0]["finish_reason"] for answer in (empty, late, stopped, stopped_late)} == {"stop"}
