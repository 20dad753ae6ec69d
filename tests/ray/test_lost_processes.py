"""The central scheduler or the only door dies, or stands still, under full load."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from tests.ray.server_process import ServerProcess, running_server
from tests.ray.streams import Stream, solo_texts

pytestmark = [pytest.mark.ray, pytest.mark.model, pytest.mark.timeout(600)]

_NUM_RUNNING = 16
_NUM_STREAMS = 2 * _NUM_RUNNING
_NUM_TOKENS = 40
_STOP_S = 10.0
_DOOR_DEADLINE_S = 10.0


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    limit = f"central.max_offers_per_generation_worker={_NUM_RUNNING}"
    options = ["--config", "local-cpu", "--dtype", "float32", "--local-prefill", "0", "--set", limit]
    with running_server(*options) as started:
        yield started


@pytest.fixture(scope="module")
def solo(server: ServerProcess) -> list[str]:
    return solo_texts(server, _NUM_STREAMS, _NUM_TOKENS)


def wait_for(server: ServerProcess, condition: Callable[[Any], bool], timeout_s: float = 90.0) -> Any:
    """The first state that fulfils the condition; answers of a server in trouble are passed over."""
    deadline_s = time.monotonic() + timeout_s
    state: Any = None
    while time.monotonic() < deadline_s:
        try:
            answer = httpx.get(f"{server.url}/cluster/state", timeout=5)
        except httpx.TransportError:
            continue
        if answer.status_code == httpx.codes.OK and condition(state := answer.json()):
            return state
        time.sleep(0.05)
    pytest.fail(f"not within {timeout_s} s; the last state: {state}")


def start_streams(server: ServerProcess) -> list[Stream]:
    """Returns when half of the requests decode and the others wait."""
    streams = [Stream(server, number, _NUM_TOKENS) for number in range(_NUM_STREAMS)]
    for stream in streams:
        stream.start()

    def is_full(state: Any) -> bool:
        (generation,) = (worker for worker in state["workers"] if worker["role"] == "generation")
        return bool(generation["running"] >= _NUM_RUNNING // 2 and state["central"]["queued"] > 0)

    wait_for(server, is_full)
    return streams


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_every_request_ends_with_its_solo_tokens_when_the_central_scheduler_is(
    how: signal.Signals, server: ServerProcess, solo: list[str]
) -> None:
    before = server.state()["central"]
    streams = start_streams(server)
    os.kill(before["pid"], how)
    if how is signal.SIGSTOP:
        threading.Timer(_STOP_S, _wake, [before["pid"]]).start()
    for stream in streams:
        stream.join(300)
    assert [stream.error for stream in streams] == [""] * _NUM_STREAMS
    assert [stream.text for stream in streams] == solo
    after = wait_for(server, lambda state: state["central"]["term"] > before["term"])
    assert after["counters"]["divergences"] == 0
    server.wait_for_baseline(15)


def test_a_killed_door_ends_its_streams_and_nothing_else(server: ServerProcess, solo: list[str]) -> None:
    before = server.state()
    streams = start_streams(server)
    (door,) = before["doors"]
    os.kill(door["pid"], signal.SIGKILL)
    for stream in streams:
        stream.join(60)
    assert all(whole.startswith(stream.text) for stream, whole in zip(streams, solo, strict=True))
    assert not all(stream.is_whole for stream in streams)
    after = wait_for(server, lambda state: [d["name"] for d in state["doors"]] not in ([], [door["name"]]))
    server.wait_for_baseline(_DOOR_DEADLINE_S + 5)
    for role in ("workers", "central"):
        assert _pids(after[role]) == _pids(before[role])
    assert solo_texts(server, 2, _NUM_TOKENS) == solo[:2]


def _pids(part: Any) -> list[int]:
    return sorted(entry["pid"] for entry in (part if isinstance(part, list) else [part]))


def _wake(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # the supervisor may have ended it
        os.kill(pid, signal.SIGCONT)
