"""Traces of a real server: OTLP from the door, and the file for Perfetto, a killed worker included."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fakes.otlp_receiver import OtlpReceiver, otlp_receiver
from tests.ray.server_process import ServerProcess, running_server

# Not marked `ray`: what is shown is tested in one process, too, and a server of its own takes a minute.
pytestmark = [pytest.mark.slow, pytest.mark.model, pytest.mark.timeout(600)]

_TRACE = "0af7651916cd43dd8448eb211c80319c"


@pytest.fixture(scope="module")
def traced() -> Iterator[tuple[ServerProcess, OtlpReceiver]]:
    with otlp_receiver() as receiver:
        arguments = ("--config", "local-cpu", "--dtype", "float32", "--otlp-endpoint", receiver.url)
        with running_server(*arguments) as server:
            yield server, receiver


def worker(server: ServerProcess, name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(each for each in server.state()["workers"] if each["name"] == name)
    return found


def export(server: ServerProcess, file: Path) -> list[dict[str, Any]]:
    command = [
        sys.executable,
        "-m",
        "serving.cli",
        "trace",
        "export",
        "--out",
        str(file),
        "--url",
        server.url,
        "--json",
    ]
    told = json.loads(subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout)
    events: list[dict[str, Any]] = json.loads(file.read_text())["traceEvents"]
    assert told["events"] == len(events)
    return events


def test_processes_of_one_request_are_in_one_trace_and_in_the_right_order(
    traced: tuple[ServerProcess, OtlpReceiver],
) -> None:
    server, receiver = traced
    body = {"model": server.model, "prompt": "word " * 700, "max_tokens": 8, "ignore_eos": True}
    headers = {"traceparent": f"00-{_TRACE}-b7ad6b7169203331-01"}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=300)
    timeline = httpx.get(f"{server.url}/requests/{answer.json()['id']}").json()
    assert timeline["trace_id"] == _TRACE
    deadline_s = time.monotonic() + 30  # the exporter sends every 5 seconds
    while not receiver.named("request"):
        assert time.monotonic() < deadline_s
        time.sleep(0.1)
    spans = [span for span in receiver.spans if span["trace_id"] == _TRACE]
    where = {span["name"]: span["pdserve.process"] for span in spans}
    assert where["prefill"] == where["prefill.chunk"] == "context-0"
    assert where["transfer"] == where["decode"] == "generation-0"
    assert ("queue", "central") in {(span["name"], span["pdserve.process"]) for span in spans}
    assert len([span for span in spans if span["name"] == "prefill.chunk"]) >= 2
    (root,) = [span for span in spans if span["name"] == "request"]
    assert root["service"] == root["service"] | {"service.name": "pdserve", "service.instance.id": "door-0"}
    by_name = {name: min(span["began_ns"] for span in spans if span["name"] == name) for name in where}
    assert by_name["prefill"] < by_name["transfer"] < by_name["decode"]


def test_the_exported_file_shows_steps_transfers_and_the_death_of_a_worker(
    traced: tuple[ServerProcess, OtlpReceiver], tmp_path: Path
) -> None:
    server, _ = traced
    for number in range(3):
        server.complete(f"Tell me about {number}", max_tokens=6, ignore_eos=True)
    before = worker(server, "context-0")["pid"]
    os.kill(before, signal.SIGKILL)
    deadline_s = time.monotonic() + 90
    while (found := worker(server, "context-0"))["state"] != "running" or found["pid"] == before:
        assert time.monotonic() < deadline_s
        time.sleep(0.1)
    server.complete("And now " * 100, max_tokens=6)  # more than a generation worker computes itself
    events = export(server, tmp_path / "trace.json")
    pids = {e["args"]["name"].split()[0]: e["pid"] for e in events if e["name"] == "process_name"}
    assert set(pids) == {"central", "context-0", "generation-0"}
    shown = {(event["pid"], event.get("cat")) for event in events}
    assert {(pids["context-0"], "chunk"), (pids["generation-0"], "transfer"), (pids["generation-0"], "step")} <= shown
    lives = [event["name"] for event in events if event["ph"] == "i" and event["pid"] == pids["context-0"]]
    assert [name.split()[0] for name in lives] == ["started", "lost:", "started"]
    assert {event["ph"] for event in events} >= {"X", "M", "C", "i", "s", "f"}
