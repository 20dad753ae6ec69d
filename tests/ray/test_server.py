"""The whole server, over HTTP: what a client sees, and what is left afterwards."""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from tests.ray.server_process import ServerProcess

pytestmark = [pytest.mark.ray, pytest.mark.model, pytest.mark.timeout(600)]

_WORDS = ["river", "stone", "lamp", "green", "window", "paper", "engine", "quiet", "mountain", "letter"]


def _prompt(index: int) -> str:
    return " ".join(_WORDS[(index * step) % len(_WORDS)] for step in range(1, 6 + 3 * (index % 8)))


def test_a_completion_through_the_openai_client_is_sensible_english(disaggregated: ServerProcess) -> None:
    client = openai.OpenAI(base_url=f"{disaggregated.url}/v1", api_key="none")
    answer = client.completions.create(
        model=disaggregated.model, prompt="The capital of France is", max_tokens=8, temperature=0
    )
    assert "Paris" in answer.choices[0].text
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 8


def test_a_streamed_chat_gives_the_text_of_the_unstreamed_one(disaggregated: ServerProcess) -> None:
    client = openai.OpenAI(base_url=f"{disaggregated.url}/v1", api_key="none")
    messages: Any = [{"role": "user", "content": "Name three colours."}]
    fields: dict[str, Any] = {"model": disaggregated.model, "messages": messages, "max_tokens": 24, "temperature": 0}
    whole = client.chat.completions.create(**fields)
    stream = client.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True})
    pieces, usage = [], None
    for chunk in stream:
        usage = chunk.usage or usage
        pieces += [choice.delta.content or "" for choice in chunk.choices]
    assert "".join(pieces) == whole.choices[0].message.content
    assert usage is not None
    assert whole.usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (whole.usage.prompt_tokens, whole.usage.completion_tokens)


def test_the_timeline_of_a_request_has_every_phase(disaggregated: ServerProcess) -> None:
    answer = disaggregated.complete(_prompt(3), max_tokens=4, temperature=0)
    timeline = httpx.get(f"{disaggregated.url}/requests/{answer['id']}").json()
    text = json.dumps(timeline)
    for phase in ("queue", "context", "transfer", "generation"):
        assert phase in text


def test_32_concurrent_streams_equal_their_solo_runs_and_leave_the_pools_at_baseline(
    disaggregated: ServerProcess,
) -> None:
    def run(index: int) -> str:
        fields = {"max_tokens": 24, "temperature": 0.8 if index % 2 else 0, "seed": index}
        choices: list[dict[str, Any]] = disaggregated.complete(_prompt(index), **fields)["choices"]
        return str(choices[0]["text"])

    solo = [run(index) for index in range(32)]
    with ThreadPoolExecutor(32) as threads:
        together = list(threads.map(run, range(32)))
    assert together == solo
    disaggregated.wait_for_baseline()


def test_disconnecting_10_of_20_streams_leaves_the_others_and_the_pools_whole(disaggregated: ServerProcess) -> None:
    def body(index: int) -> dict[str, Any]:
        return {
            "model": disaggregated.model,
            "prompt": _prompt(index),
            "max_tokens": 40,
            "temperature": 0,
            "stream": True,
            "ignore_eos": True,
        }

    def run(index: int) -> str:
        text, received = "", 0
        with httpx.stream("POST", f"{disaggregated.url}/v1/completions", json=body(index), timeout=300) as response:
            for line in response.iter_lines():
                if not line.startswith("data: {"):
                    continue
                text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
                received += 1
                if index % 2 and received == 5:
                    return "disconnected"
        return text

    expected = [run(index) for index in range(0, 20, 2)]
    with ThreadPoolExecutor(20) as threads:
        results = list(threads.map(run, range(20)))
    assert results[0::2] == expected
    assert results[1::2] == ["disconnected"] * 10
    disaggregated.wait_for_baseline(timeout_s=2 * 0.5 + 2)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{not json", 400),
        ({"model": "no-such-model", "prompt": "a"}, 404),
        ({"prompt": ""}, 400),
        ({"prompt": [1, 999_999]}, 400),
        ({"prompt": "a", "max_tokens": 9000}, 400),
        ({"prompt": "a", "max_tokens": -1}, 400),
        ({"prompt": "a", "max_tokens": 0}, 400),
        ({"prompt": {"a": 1}}, 400),
        ({"prompt": "a", "temperature": "hot"}, 400),
        ({"prompt": "a" * 5_000_000}, 413),
    ],
)
def test_bad_input_gets_an_openai_error_and_the_server_lives(
    disaggregated: ServerProcess, body: bytes | dict[str, Any], status: int
) -> None:
    content = body if isinstance(body, bytes) else json.dumps({"model": disaggregated.model, **body}).encode()
    answer = httpx.post(
        f"{disaggregated.url}/v1/completions", content=content, headers={"Content-Type": "application/json"}, timeout=60
    )
    assert answer.status_code == status, answer.text
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert disaggregated.complete("a", max_tokens=1)["choices"]


def test_cluster_state_names_every_worker_with_its_pages(disaggregated: ServerProcess) -> None:
    state = disaggregated.state()
    assert {worker["role"] for worker in state["workers"]} == {"context", "generation"}
    for worker in state["workers"]:
        assert {"name", "role", "pid", "epoch", "state", "iteration", "running", "waiting", "pages", "ledger"} <= set(
            worker
        )
        assert worker["pages"]["device"]["total"] > 0
    assert {"pid", "term"} <= set(state["central"])
    assert {"deferrals", "rollbacks", "suspensions", "transfers", "divergences"} <= set(state["counters"])
    assert state["counters"]["divergences"] == 0


def test_transfers_really_move_bytes(disaggregated: ServerProcess) -> None:
    disaggregated.wait_for_baseline()
    time.sleep(1)  # accounts come with heartbeats: let those of earlier requests arrive
    before = disaggregated.state()["counters"]
    disaggregated.complete("Once upon a time in a village by the sea", max_tokens=4)
    deadline_s = time.monotonic() + 5
    while disaggregated.state()["counters"]["transfer_bytes"] == before["transfer_bytes"]:
        assert time.monotonic() < deadline_s
        time.sleep(0.1)
    assert disaggregated.state()["counters"]["transfers"] == before["transfers"] + 1
