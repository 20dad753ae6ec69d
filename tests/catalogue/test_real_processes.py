"""Kinds B and C again, with real Ray actors that are really killed and stopped: one small server for all of it."""

import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.ray.server_process import ServerProcess, running_server

pytestmark = [pytest.mark.ray, pytest.mark.model, pytest.mark.timeout(600)]

_CONFIG = """
engine: {model: smollm2-135m, dtype: float32}
cache: {tiers: [{tier: device, quota_bytes: 100663296}]}
cluster: {context_workers: 2, generation_workers: 1}
router: {local_prefill_max_tokens: 0}
"""
_NUM_TOKENS = 48


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    path = tmp_path_factory.mktemp("config") / "small.yaml"
    path.write_text(_CONFIG)
    with running_server("--config", str(path)) as started:
        yield started


def _prompt(number: int) -> list[int]:
    return [1000 + 37 * number + position for position in range(40)]


def _stream(server: ServerProcess, number: int, *, leave_after: int | None = None) -> list[str]:
    """The texts of a stream's chunks; `leave_after` as many, the client disconnects."""
    body: dict[str, Any] = {
        "model": server.model, "prompt": _prompt(number), "max_tokens": _NUM_TOKENS, "temperature": 0,
        "ignore_eos": True, "stream": True,
    }  # fmt: skip
    texts: list[str] = []
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=300) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line.removeprefix("data: "))
                assert "error" not in chunk, chunk
                texts.append(chunk["choices"][0]["text"])
                if leave_after is not None and len(texts) >= leave_after:
                    break
    return texts


def _solo(server: ServerProcess, numbers: range) -> list[str]:
    return ["".join(_stream(server, number)) for number in numbers]


def _pid(server: ServerProcess, name: str) -> int:
    return next(int(worker["pid"]) for worker in server.state()["workers"] if worker["name"] == name)


def _wait_until_healthy(server: ServerProcess, timeout_s: float = 60.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while httpx.get(f"{server.url}/health", timeout=30).status_code != 200:
        assert time.monotonic() < deadline_s, server.state()
        time.sleep(0.2)


def _run(server: ServerProcess, numbers: range, disturb: Any) -> list[str]:
    """All streams at once; `disturb` is called when they have begun."""
    with ThreadPoolExecutor(len(numbers)) as threads:
        futures: list[Future[list[str]]] = [threads.submit(_stream, server, number) for number in numbers]
        time.sleep(0.7)
        disturb()
        return ["".join(future.result()) for future in futures]


@pytest.mark.parametrize("name", ["context-0", "generation-0"])
def test_c02_c12_c13_a_killed_worker_costs_no_stream_a_token_and_the_server_recovers(
    server: ServerProcess, name: str
) -> None:
    expected = _solo(server, range(6))
    first_pid = _pid(server, name)
    assert _run(server, range(6), lambda: os.kill(first_pid, signal.SIGKILL)) == expected
    _wait_until_healthy(server)
    assert _stream(server, 1)
    deadline_s = time.monotonic() + 60
    while _pid(server, name) == first_pid:
        assert time.monotonic() < deadline_s
        time.sleep(0.2)
    server.wait_for_baseline(20)


def test_b08_b17_a_stopped_reader_is_fenced_and_its_streams_go_on(server: ServerProcess) -> None:
    expected = _solo(server, range(10, 14))
    pid = _pid(server, "generation-0")
    try:
        assert _run(server, range(10, 14), lambda: os.kill(pid, signal.SIGSTOP)) == expected
    finally:
        if _is_alive(pid):
            os.kill(pid, signal.SIGCONT)
    _wait_until_healthy(server)
    server.wait_for_baseline(20)


@pytest.mark.parametrize("leave_after", [1, 5, _NUM_TOKENS - 1])
def test_c04_clients_that_leave_free_their_pages_and_disturb_nobody(server: ServerProcess, leave_after: int) -> None:
    expected = _solo(server, range(20, 23))
    with ThreadPoolExecutor(3) as threads:
        left = [threads.submit(_stream, server, number, leave_after=leave_after) for number in range(30, 33)]
        stayed = _run(server, range(20, 23), lambda: None)
        assert [len(future.result()) for future in left] == [leave_after] * 3
    assert stayed == expected
    server.wait_for_baseline(20)


def test_c04_clients_that_leave_before_anything_was_said_free_their_pages_and_disturb_nobody(
    server: ServerProcess,
) -> None:
    """Queued, or in the middle of the prompt: no status line has been sent yet."""
    expected = _solo(server, range(40, 42))
    before = server.state()["door"]["counters"].get("cancelled_requests", 0)

    def leave(number: int) -> None:
        body = {"model": server.model, "prompt": _prompt(number) * 8, "max_tokens": _NUM_TOKENS, "ignore_eos": True}
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{server.url}/v1/completions", json=body, timeout=httpx.Timeout(30, read=0.05))

    def leave_all() -> None:
        with ThreadPoolExecutor(6) as threads:
            list(threads.map(leave, range(50, 56)))

    assert _run(server, range(40, 42), leave_all) == expected
    state = server.wait_for_baseline(20)
    assert state["door"]["counters"]["cancelled_requests"] - before == 6


@pytest.mark.slow
def test_c11_c01_a_context_worker_that_is_killed_between_two_others_leaves_no_counter_drifted(
    server: ServerProcess,
) -> None:
    """Prompts of several chunks, so that contexts are being computed, leased and read when it dies."""
    pid = _pid(server, "context-1")
    before = server.state()["counters"]["divergences"]

    def text(number: int) -> str:
        answer = server.complete(_prompt(60 + number) * 12, max_tokens=4, temperature=0, ignore_eos=True)
        return str(answer["choices"][0]["text"])

    with ThreadPoolExecutor(6) as threads:
        answers = [threads.submit(text, number) for number in range(6)]
        time.sleep(0.3)
        os.kill(pid, signal.SIGKILL)
        texts = [answer.result() for answer in answers]
    assert texts == [text(number) for number in range(6)]
    _wait_until_healthy(server)
    state = server.wait_for_baseline(20)
    assert state["counters"]["divergences"] == before
    assert {(worker["ledger"]["attempts"], worker["ledger"]["tokens"]) for worker in state["workers"]} == {(0, 0)}


def _is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()
