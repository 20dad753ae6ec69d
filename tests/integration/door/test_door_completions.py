"""POST /v1/completions, whole and streamed."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scheduler.spec import SamplingParams
from tests.fakes.door import MODEL, open_door, run_async
from tests.fakes.scheduler_endpoint import spoken_tokens
from tests.fakes.tiny_tokenizer import EOS_TOKEN_ID
from tests.integration.door.sse import events


@run_async
async def test_a_completion_has_every_field_that_clients_read(tiny_folder: Path) -> None:
    async with open_door(tiny_folder) as door:
        door.cluster.draw = spoken_tokens(door.tokenizer.encode(" the sea"))
        door.cluster.cached_tokens = 1
        answer = await door.complete(prompt="Once upon", max_tokens=4)
        num_prompt_tokens = len(door.tokenizer.encode("Once upon"))
        spoken = door.tokenizer.decode([door.cluster.draw(door.cluster.submissions[0][0], i) for i in range(4)])
    assert answer.status_code == 200
    assert answer.json() == {
        "id": "cmpl-id2",
        "object": "text_completion",
        "created": 1_700_000_000,
        "model": MODEL,
        "choices": [{"index": 0, "text": spoken, "logprobs": None, "finish_reason": "length"}],
        "usage": {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": 4,
            "total_tokens": num_prompt_tokens + 4,
            "prompt_tokens_details": {"cached_tokens": 1},
        },
    }


@run_async
async def test_omitted_max_tokens_is_16(tiny_folder: Path) -> None:
    async with open_door(tiny_folder) as door:
        answer = await door.complete(ignore_eos=True)
    assert answer.json()["usage"]["completion_tokens"] == 16


@run_async
async def test_an_end_of_sequence_token_is_counted_and_is_no_text(tiny_folder: Path) -> None:
    async with open_door(tiny_folder) as door:
        words = door.tokenizer.encode(" river")
        door.cluster.draw = spoken_tokens([*words, EOS_TOKEN_ID])
        choice = (answer := (await door.complete()).json())["choices"][0]
    assert choice["text"] == " river"
    assert choice["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == len(words) + 1


@run_async
async def test_ignore_eos_goes_on_to_the_length(tiny_folder: Path) -> None:
    async with open_door(tiny_folder) as door:
        door.cluster.draw = spoken_tokens([*door.tokenizer.encode(" river"), EOS_TOKEN_ID])
        choice = (await door.complete(ignore_eos=True, max_tokens=9)).json()["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["text"].startswith(" river river")


@run_async
async def test_stop_token_ids_end_the_text_before_their_own(tiny_folder: Path) -> None:
    async with open_door(tiny_folder) as door:
        sea = door.tokenizer.encode(" the sea")
        dot = door.tokenizer.encode(".")[0]
        door.cluster.draw = spoken_tokens([*sea, dot])
        choice = (await door.complete(stop_token_ids=[dot])).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (" the sea", "stop")


@pytest.mark.parametrize(
    ("stop", "includes", "text"),
    [
        ("ea, pl", False, "Tell me of the s"),
        (["zzz", "ea, pl"], True, "Tell me of the sea, pl"),
        (["see", "sea"], False, "Tell me of the "),
        ("T", False, ""),
    ],
)
@run_async
async def test_a_stop_string_is_found_across_tokens(
    tiny_folder: Path, stop: str | list[str], includes: bool, text: str
) -> None:
    async with open_door(tiny_folder) as door:
        said = "Tell me of the sea, please. And of the rest"
        door.cluster.draw = spoken_tokens(door.tokenizer.encode(said))
        fields: dict[str, Any] = {"stop": stop, "max_tokens": 60, "include_stop_str_in_output": includes}
        whole = (await door.complete(**fields)).json()["choices"][0]
        streamed = events((await door.complete(**fields, stream=True)).text)
        assert door.cluster.cancelled == [], "the worker and the door disagreed on the end"
    assert (whole["text"], whole["finish_reason"]) == (text, "stop")
    assert "".join(event["choices"][0]["text"] for event in streamed) == text


@run_async
async def test_prompts_and_choices_are_numbered_prompt_first(tiny_folder: Path) -> None:
    async with open_door(tiny_folder) as door:
        prompts = ["Once", "upon", "a time"]
        answer = (await door.complete(prompt=prompts, n=2, seed=5, max_tokens=6)).json()
        alone = [
            (await door.complete(prompt=prompt, n=2, seed=5, max_tokens=6)).json()["choices"] for prompt in prompts
        ]
        specs = door.cluster.submissions[0]
        num_prompt_tokens = sum(len(door.tokenizer.encode(prompt)) for prompt in prompts)
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    assert [spec.uid for spec in specs] == [f"{answer['id']}/{index}" for index in range(6)]
    assert [(spec.sampling.choice, spec.sampling.seed) for spec in specs] == [(0, 5), (1, 5)] * 3
    # Where a prompt stands among others does not change its text.
    assert [c["text"] for c in answer["choices"]] == [c["text"] for choices in alone for c in choices]
    assert answer["usage"]["prompt_tokens"] == num_prompt_tokens


@run_async
async def test_a_prompt_may_be_token_ids(tiny_folder: Path) -> None:
    async with open_door(tiny_folder) as door:
        ids = door.tokenizer.encode("Once upon")
        texts = [
            (await door.complete(prompt=prompt, seed=1, max_tokens=5)).json()["choices"][0]["text"]
            for prompt in ("Once upon", ids, [ids])
        ]
    assert len(set(texts)) == 1


@run_async
async def test_a_seed_is_drawn_once_and_kept_for_all_choices(tiny_folder: Path) -> None:
    async with open_door(tiny_folder) as door:
        await door.complete(n=3, max_tokens=1)
        await door.complete(n=1, max_tokens=1)
        await door.complete(n=1, max_tokens=1, seed=-1)
        seeds = [[spec.sampling.seed for spec in specs] for specs in door.cluster.submissions]
    assert seeds == [[1000] * 3, [1001], [2**63 - 1]]


@pytest.mark.parametrize(
    ("fields", "sampling"),
    [
        ({}, SamplingParams()),
        ({"temperature": 0.5, "top_k": 7, "top_p": 0.5, "min_p": 0.25}, SamplingParams(0.5, 7, 0.5, 0.25)),
        ({"temperature": 0}, SamplingParams(temperature=0.0)),
        # Too small to divide by: its limit is greedy.
        ({"temperature": 1e-300}, SamplingParams(temperature=0.0)),
        # The smallest set of tokens that reaches nothing is the best one.
        ({"top_p": 0}, SamplingParams(top_k=1)),
        ({"top_k": -1}, SamplingParams()),
        ({"top_k": 10**12}, SamplingParams()),
    ],
)
@run_async
async def test_sampling_parameters_reach_the_workers(
    tiny_folder: Path, fields: dict[str, Any], sampling: SamplingParams
) -> None:
    async with open_door(tiny_folder) as door:
        await door.complete(**fields, seed=1, priority=-3, max_tokens=1)
        spec = door.cluster.submissions[0][0]
    assert spec.sampling == replace(sampling, seed=1)
    assert (spec.priority, spec.stop.max_tokens, spec.door) == (-3, 1, "door")


@pytest.mark.parametrize("is_stream", [False, True])
@run_async
async def test_echo_repeats_the_prompt_before_the_text(tiny_folder: Path, is_stream: bool) -> None:
    async with open_door(tiny_folder) as door:
        prompts = ["Once <|im_end|> upon", "a 中 time"]
        plain = (await door.complete(prompt=prompts, n=2, seed=3, max_tokens=5)).json()["choices"]
        fields: dict[str, Any] = {"prompt": prompts, "n": 2, "seed": 3, "max_tokens": 5, "echo": True}
        answer = await door.complete(**fields, stream=is_stream)
        texts = ["", "", "", ""]
        for event in events(answer.text) if is_stream else [answer.json()]:
            for choice in event["choices"]:
                texts[choice["index"]] += choice["text"]
    assert texts == [prompts[i // 2] + choice["text"] for i, choice in enumerate(plain)]


@pytest.mark.parametrize("is_stream", [False, True])
@run_async
async def test_echo_with_no_tokens_returns_the_prompt_and_computes_nothing(tiny_folder: Path, is_stream: bool) -> None:
    async with open_door(tiny_folder) as door:
        ids = door.tokenizer.encode("Once upon <|im_end|> 中")
        answer = await door.complete(prompt=ids, max_tokens=0, echo=True, stream=is_stream)
        assert door.cluster.submissions == []
        found = events(answer.text) if is_stream else [answer.json()]
        timeline = (await door.client.get(f"/requests/{found[0]['id']}")).json()
    choices = [choice for event in found for choice in event["choices"]]
    assert "".join(choice["text"] for choice in choices) == "Once upon <|im_end|> 中"
    assert choices[-1]["finish_reason"] == "length"
    assert timeline["state"] == "finished"


@run_async
async def test_streamed_pieces_join_to_the_whole_text(tiny_folder: Path) -> None:
    async with open_door(tiny_folder) as door:
        # Hashed tokens are arbitrary bytes: most characters are halves, and some text is held back.
        whole = (await door.complete(n=4, seed=9, max_tokens=40, ignore_eos=True)).json()
        answer = await door.complete(n=4, seed=9, max_tokens=40, ignore_eos=True, stream=True)
        found = events(answer.text)
    assert answer.headers["content-type"].startswith("text/event-stream")
    texts = ["", "", "", ""]
    reasons: list[list[str]] = [[], [], [], []]
    for event in found:
        assert event["object"] == "text_completion"
        assert "usage" not in event
        (choice,) = event["choices"]
        assert choice["text"] or choice["finish_reason"]
        texts[choice["index"]] += choice["text"]
        reasons[choice["index"]] += [choice["finish_reason"]] if choice["finish_reason"] else []
    assert texts == [choice["text"] for choice in whole["choices"]]
    assert reasons == [["length"]] * 4


@run_async
async def test_usage_comes_last_and_only_when_asked_for(tiny_folder: Path) -> None:
    async with open_door(tiny_folder) as door:
        fields: dict[str, Any] = {"n": 2, "seed": 9, "max_tokens": 7, "ignore_eos": True}
        whole = (await door.complete(**fields)).json()
        found = events((await door.complete(**fields, stream=True, stream_options={"include_usage": True})).text)
    assert all(event["usage"] is None for event in found[:-1])
    assert found[-1]["choices"] == []
    assert found[-1]["usage"] == whole["usage"]
    assert whole["usage"]["completion_tokens"] == 14
