"""Two doors behind one port: what one of them loses is no business of the other's."""

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.ray.server_process import ServerProcess, running_server
from tests.ray.streams import Stream, solo_texts

pytestmark = [pytest.mark.ray, pytest.mark.model, pytest.mark.timeout(600)]

_NUM_STREAMS = 12
_NUM_TOKENS = 48


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with running_server("--config", "local-mixed", "--dtype", "float32", "--doors", "2") as started:
        yield started


def doors(server: ServerProcess) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = server.state()["doors"]
    return found


def owner(server: ServerProcess, api_id: str) -> str:
    return str(httpx.get(f"{server.url}/requests/{api_id}", timeout=30).json()["door"])


def test_one_door_killed_leaves_the_streams_of_the_other_unchanged(server: ServerProcess) -> None:
    solo = solo_texts(server, _NUM_STREAMS, _NUM_TOKENS)
    streams = [Stream(server, number, _NUM_TOKENS) for number in range(_NUM_STREAMS)]
    for stream in streams:
        stream.start()
    deadline_s = time.monotonic() + 120
    while not all(stream.api_id for stream in streams):
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
    # Any door may be asked, so this also shows that each finds the other's requests.
    owners = [owner(server, stream.api_id) for stream in streams]
    assert set(owners) == {"door-0", "door-1"}
    before = {door["name"].partition("#")[0]: door for door in doors(server)}
    os.kill(before["door-1"]["pid"], signal.SIGKILL)
    for stream in streams:
        stream.join(200)
    for stream, name, expected in zip(streams, owners, solo, strict=True):
        assert stream.is_whole == (name == "door-0")
        if stream.is_whole:
            assert stream.text == expected
        else:
            assert expected.startswith(stream.text)
    while len(after := doors(server)) < 2:
        assert time.monotonic() < deadline_s + 60, after
        time.sleep(0.1)
    assert after[0]["name"] == before["door-0"]["name"]
    assert after[1]["name"] != before["door-1"]["name"]
    server.wait_for_baseline(15)


def test_whichever_door_answers_tells_of_both(server: ServerProcess) -> None:
    api_id = server.complete("Hello", max_tokens=3)["id"]
    for _ in range(8):  # each on a connection of its own
        assert httpx.get(f"{server.url}/requests/{api_id}").json()["choices"][0]["completion_tokens"] == 3
        text = httpx.get(f"{server.url}/metrics").text
        for name in ("door-0", "door-1"):
            assert f'vllm:generation_tokens_total{{door="{name}"' in text
        assert len(doors(server)) == 2
