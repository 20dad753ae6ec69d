"""A conversation over real HTTP: only what is new of a turn is computed, and usage says so."""

from typing import Any

import httpx
import pytest

from tests.ray.server_process import ServerProcess, running_server

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.model, pytest.mark.timeout(600)]

_BLOCK = 16
_QUESTIONS = [
    "Name three rivers of Europe, and tell me in one sentence each through which countries they flow. " * 3,
    "Which of them is the longest?",
    "And which one is the shortest? Tell me how long it is, too, and where its source and its mouth are. " * 4,
    "Name a city on each.",
    "Thank you. Say goodbye.",
]
_NUM_TOKENS = 24


def _turn(server: ServerProcess, messages: list[dict[str, str]]) -> dict[str, Any]:
    body = {"model": server.model, "messages": messages, "max_tokens": _NUM_TOKENS, "temperature": 0}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=300)
    assert answer.status_code == 200, answer.text
    document: dict[str, Any] = answer.json()
    return document


def _chat(server: ServerProcess) -> tuple[list[str], list[dict[str, Any]]]:
    """Text and usage of each turn."""
    messages: list[dict[str, str]] = []
    texts, usages = [], []
    for question in _QUESTIONS:
        messages.append({"role": "user", "content": question})
        document = _turn(server, messages)
        texts.append(document["choices"][0]["message"]["content"])
        usages.append(document["usage"])
        messages.append({"role": "assistant", "content": texts[-1]})
        server.wait_for_baseline()
    return texts, usages


def _assert_only_news_are_computed(usages: list[dict[str, Any]]) -> None:
    known = 0
    for usage in usages:
        computed = usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"]
        assert computed <= usage["prompt_tokens"] - known + _BLOCK
        known = usage["prompt_tokens"] + usage["completion_tokens"]


def test_of_each_turn_only_what_is_new_is_computed_and_the_texts_are_those_of_a_server_that_hands_all_over(
    disaggregated: ServerProcess,
) -> None:
    with running_server("--config", "local-cpu", "--dtype", "float32") as server:
        texts, usages = _chat(server)
        state = server.state()
    assert state["routing"]["local_prefills"] == len(_QUESTIONS) - 1
    assert state["routing"]["local_turns"] == 1, "one question is longer than a prompt that is always computed there"
    assert state["counters"]["transfers"] == 1
    _assert_only_news_are_computed(usages)
    assert _chat(disaggregated)[0] == texts
