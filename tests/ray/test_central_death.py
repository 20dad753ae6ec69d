"""The central scheduler dies, or is stopped and woken up, with 16 streams running and 16 requests queued (C6)."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.ray.server_process import ServerProcess, running_server

pytestmark = [pytest.mark.slow, pytest.mark.model, pytest.mark.timeout(600)]

_CONFIG = """
engine: {model: smollm2-135m, dtype: float32}
cache: {tiers: [{tier: device, quota_bytes: 100663296}]}
cluster: {context_workers: 1, generation_workers: 1}
central: {max_offers_per_generation_worker: 12, max_running_per_context_worker: 4}
"""
_NUM_REQUESTS = 32
_NUM_DECODING = 4
_NUM_QUEUED = 8  # at least, when it strikes: 16 at first
_NUM_TOKENS = 32
_NUM_RUNNING = 16
_STOP_S = 10.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    path = tmp_path_factory.mktemp("config") / "queueing.yaml"
    path.write_text(_CONFIG)
    with running_server("--config", str(path)) as started:
        yield started


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[httpx.Client]:
    """One for all threads: making one takes longer than many a request here."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    with httpx.Client(base_url=server.url, timeout=300, limits=limits) as made:
        yield made


@pytest.fixture(scope="module")
def solo(server: ServerProcess, client: httpx.Client) -> list[str]:
    """The text of each request by itself."""
    return [_text(server, client, number) for number in range(_NUM_REQUESTS)]


def _text(server: ServerProcess, client: httpx.Client, number: int) -> str:
    prompt = [1000 + 37 * number + position for position in range(24)]
    body = {"model": server.model, "prompt": prompt, "max_tokens": _NUM_TOKENS, "temperature": 0, "ignore_eos": True}
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == httpx.codes.OK, answer.text
    return str(answer.json()["choices"][0]["text"])


def _wait_until_full(client: httpx.Client) -> dict[str, Any]:
    """Until both workers hold what they are given, streams decode, and the others wait.

    By the central scheduler's own books: what workers say of themselves is half a second old.
    """
    deadline_s = time.monotonic() + 60
    while True:
        state: dict[str, Any] = client.get("/cluster/state").json()
        held = sum(worker["ledger"]["attempts"] for worker in state["workers"] if worker["role"] == "generation")
        central = state["central"]
        is_full = central["running"] >= _NUM_RUNNING and central["queued"] >= _NUM_QUEUED
        if is_full and held >= _NUM_DECODING:
            return state
        assert time.monotonic() < deadline_s, state
        time.sleep(0.02)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_every_stream_and_every_queued_request_ends_with_its_solo_tokens(
    server: ServerProcess, client: httpx.Client, solo: list[str], how: signal.Signals
) -> None:
    with ThreadPoolExecutor(_NUM_REQUESTS) as threads:
        answers = [threads.submit(_text, server, client, number) for number in range(_NUM_REQUESTS)]
        before = _wait_until_full(client)["central"]
        os.kill(before["pid"], how)
        waking = threading.Timer(_STOP_S, _wake, [before["pid"]])
        waking.start()
        assert [answer.result() for answer in answers] == solo
        waking.join()
    after = server.wait_for_baseline(20)
    assert after["central"]["pid"] != before["pid"]
    assert after["central"]["term"] > before["term"]
    assert after["counters"]["divergences"] == 0


def _wake(pid: int) -> None:
    if Path(f"/proc/{pid}").exists():
        os.kill(pid, signal.SIGCONT)
