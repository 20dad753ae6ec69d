"""A worker is killed (kill -9) in mid-stream: what clients are told does not change, whatever was asked for (C9)."""

import json
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.ray.server_process import ServerProcess

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.model, pytest.mark.timeout(600)]

_SCHEMA = {
    "type": "object",
    "properties": {"river": {"type": "string", "maxLength": 20}, "lengths_km": {"type": "array", "maxItems": 20,
                   "minItems": 20, "items": {"type": "integer", "minimum": 100, "maximum": 9999}}},
    "required": ["river", "lengths_km"],
    "additionalProperties": False,
}  # fmt: skip
_LONG = "The river runs from the mountains to the sea, and the ships on it carry grain. " * 16
_CHAT, _COMPLETION = "/v1/chat/completions", "/v1/completions"
_REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "logprobs": (_COMPLETION, {"prompt": _LONG, "max_tokens": 160, "logprobs": 3, "echo": True}),
    "penalties": (
        _COMPLETION,
        {"prompt": f"1. {_LONG}", "max_tokens": 160, "presence_penalty": 0.8, "frequency_penalty": 0.6,
         "repetition_penalty": 1.2, "logit_bias": {"30": 5}, "ignore_eos": True, "logprobs": 0},
    ),
    "min_tokens": (_COMPLETION, {"prompt": f"2. {_LONG}", "max_tokens": 180, "min_tokens": 140, "stop": ["e", "a"]}),
    "json_schema": (
        _CHAT,
        {"messages": [{"role": "user", "content": f"{_LONG} Name a river and twenty lengths."}], "max_tokens": 220,
         "response_format": {"type": "json_schema", "json_schema": {"name": "river", "schema": _SCHEMA}},
         "logprobs": True, "top_logprobs": 2},
    ),
}  # fmt: skip


class _Told:
    """What one stream told, put together."""

    def __init__(self) -> None:
        self.num_events = 0
        self.text = ""
        self.scores: dict[str, list[Any]] = {}
        self.reasons: list[str] = []
        self.usage: dict[str, Any] = {}

    def add(self, event: dict[str, Any]) -> None:
        assert "error" not in event, event
        self.num_events += 1
        self.usage = event["usage"] or self.usage
        for choice in event["choices"]:
            self.text += choice["text"] if "text" in choice else choice["delta"].get("content") or ""
            for name, values in (choice["logprobs"] or {}).items():
                self.scores.setdefault(name, []).extend(values or [])
            self.reasons += [choice["finish_reason"]] if choice["finish_reason"] else []

    def comparable(self) -> tuple[object, ...]:
        counts = {name: self.usage[name] for name in ("prompt_tokens", "completion_tokens")}
        return self.text, self.scores, self.reasons, counts


def _stream(server: ServerProcess, name: str, told: _Told) -> None:
    path, fields = _REQUESTS[name]
    body = {"model": server.model, "seed": 11, "temperature": 0.8, "stream": True, **fields}
    body["stream_options"] = {"include_usage": True}
    with httpx.stream("POST", f"{server.url}{path}", json=body, timeout=300) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                told.add(json.loads(line.removeprefix("data: ")))


def _run_all(server: ServerProcess, disturb: Any) -> dict[str, _Told]:
    found = {name: _Told() for name in _REQUESTS}
    with ThreadPoolExecutor(len(found) + 1) as pool:
        streams = [pool.submit(_stream, server, name, told) for name, told in found.items()]
        disturb(found)
        for stream in streams:
            stream.result()
    return found


def _pid(server: ServerProcess, role: str) -> int:
    (pid,) = (worker["pid"] for worker in server.state()["workers"] if worker["role"] == role)
    return int(pid)


def _wait_for(condition: Any) -> None:
    deadline_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline_s
        threading.Event().wait(0.005)


def _num_lost_attempts(server: ServerProcess) -> int:
    """Begun again by the central scheduler before a first token, or by the door after it."""
    counters = server.state()["counters"]
    return int(counters["retries"] + counters["handed_back"])


def _num_in_context(server: ServerProcess) -> int:
    (worker,) = (worker for worker in server.state()["workers"] if worker["role"] == "context")
    return int(worker["running"] + worker["waiting"])


def test_a_killed_worker_changes_nothing_that_any_client_is_told(disaggregated: ServerProcess) -> None:
    """The undisturbed run is the last one: with its prefixes cached, no prompt would be computed any more."""
    server = disaggregated

    def while_prompts_are_computed(told: dict[str, _Told]) -> None:
        _wait_for(lambda: _num_in_context(server) >= 2)
        assert not all(one.num_events for one in told.values()), "prompts were computed before the worker was killed"
        os.kill(_pid(server, "context"), signal.SIGKILL)

    def in_mid_stream(told: dict[str, _Told]) -> None:
        _wait_for(lambda: all(one.num_events for one in told.values()))
        assert not any(one.reasons for one in told.values()), "a stream was over before the worker was killed"
        os.kill(_pid(server, "generation"), signal.SIGKILL)

    found = []
    for disturb, num_hit in ((while_prompts_are_computed, 1), (in_mid_stream, len(_REQUESTS))):
        num_before = _num_lost_attempts(server)
        found.append(_run_all(server, disturb))
        assert _num_lost_attempts(server) - num_before >= num_hit
        server.wait_for_baseline(timeout_s=60)
    expected = {name: told.comparable() for name, told in _run_all(server, lambda _: None).items()}
    for disturbed in found:
        assert {name: told.comparable() for name, told in disturbed.items()} == expected
    assert set(json.loads(found[0]["json_schema"].text)) == {"river", "lengths_km"}
    assert found[0]["min_tokens"].usage["completion_tokens"] >= 140
    assert all(told.reasons for told in found[0].values())
