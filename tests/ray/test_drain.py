"""SIGTERM while streams run: they finish, nothing new is taken, and the server ends well."""

import json
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import psutil
import pytest

from tests.ray.server_process import ServerProcess, start_server

pytestmark = [pytest.mark.ray, pytest.mark.model, pytest.mark.timeout(600)]

_NUM_STREAMS = 16


def _stream(server: ServerProcess, number: int) -> list[dict[str, Any]]:
    body = {
        "model": server.model,
        "prompt": f"The number {number} is",
        "max_tokens": 24,
        "ignore_eos": True,
        "stream": True,
        "temperature": 0,
        "logprobs": 1,
    }
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=300) as answer:
        assert answer.status_code == 200
        events = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert events.pop() == "[DONE]"
    return [json.loads(event) for event in events]


def test_a_signal_lets_sixteen_streams_finish_and_takes_nothing_new() -> None:
    server = start_server("--config", "local-cpu", "--dtype", "float32")
    try:
        children = server.descendants()
        server.complete("Hello", max_tokens=1)
        with ThreadPoolExecutor(_NUM_STREAMS) as pool:
            streams = [pool.submit(_stream, server, number) for number in range(_NUM_STREAMS)]
            _wait_until_running(server)
            server.process.send_signal(signal.SIGTERM)
            refused = _wait_until_refused(server)
            assert refused.headers["retry-after"] == "1"
            finished = [stream.result() for stream in streams]
        for events in finished:
            assert [event for event in events if "error" in event] == []
            reasons = [event["choices"][0]["finish_reason"] for event in events]
            assert [reason for reason in reasons if reason] == ["length"]
            scores = [event["choices"][0]["logprobs"] for event in events if event["choices"][0]["logprobs"]]
            assert sum(len(score["tokens"]) for score in scores) == 24
        assert server.process.wait(60) == 0
        _, alive = psutil.wait_procs(children, timeout=10)
        assert alive == []
    finally:
        if server.process.poll() is None:
            server.process.send_signal(signal.SIGINT)
            server.process.send_signal(signal.SIGINT)
            server.process.wait(60)


def _wait_until_running(server: ServerProcess) -> None:
    deadline_s = time.monotonic() + 120
    while sum(worker["running"] for worker in server.state()["workers"]) < _NUM_STREAMS // 2:
        assert time.monotonic() < deadline_s, "the streams did not start"
        time.sleep(0.05)


def _wait_until_refused(server: ServerProcess) -> httpx.Response:
    deadline_s = time.monotonic() + 20
    while True:
        body = {"model": server.model, "prompt": "late", "max_tokens": 1}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
        if answer.status_code == 503:
            return answer
        assert time.monotonic() < deadline_s, "the server still takes requests"
