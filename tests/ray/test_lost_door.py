"""The only door dies: its streams end, and nothing else does (C9)."""

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.ray.server_process import ServerProcess, running_server
from tests.ray.streams import Stream, solo_texts

pytestmark = [pytest.mark.ray, pytest.mark.model, pytest.mark.timeout(400)]

_NUM_STREAMS = 8
_NUM_TOKENS = 64
_DOOR_DEADLINE_S = 10.0


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with running_server("--config", "local-cpu", "--dtype", "float32", "--local-prefill", "0") as started:
        yield started


def test_a_killed_door_ends_its_streams_and_the_next_one_serves_from_the_same_workers(server: ServerProcess) -> None:
    solo = solo_texts(server, _NUM_STREAMS, _NUM_TOKENS)
    before = server.state()
    (door,) = before["doors"]
    streams = [Stream(server, number, _NUM_TOKENS) for number in range(_NUM_STREAMS)]
    for stream in streams:
        stream.start()
    while not any(stream.api_id for stream in streams):
        assert any(stream.is_alive() for stream in streams)
        time.sleep(0.01)
    os.kill(door["pid"], signal.SIGKILL)
    for stream in streams:
        stream.join(60)
    assert all(whole.startswith(stream.text) for stream, whole in zip(streams, solo, strict=True))
    assert not all(stream.is_whole for stream in streams)
    _wait_for_another_door(server, door["name"])
    after = server.wait_for_baseline(_DOOR_DEADLINE_S + 5)
    assert _pids(after) == _pids(before)
    assert solo_texts(server, 2, _NUM_TOKENS) == solo[:2]


def _wait_for_another_door(server: ServerProcess, old: str) -> None:
    deadline_s = time.monotonic() + 60
    while True:
        assert time.monotonic() < deadline_s, "no new door"
        try:
            answer = httpx.get(f"{server.url}/cluster/state", timeout=5)
        except httpx.TransportError:
            time.sleep(0.1)
            continue
        if answer.status_code == httpx.codes.OK and answer.json()["door"]["name"] != old:
            return
        time.sleep(0.1)


def _pids(state: Any) -> list[int]:
    """Of the workers and the central scheduler."""
    return [state["central"]["pid"], *sorted(worker["pid"] for worker in state["workers"])]
