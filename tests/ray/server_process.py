"""A real `pdserve serve` in a process of its own, for tests that talk to it over HTTP."""

import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import psutil

START_TIMEOUT_S = 180
STOP_TIMEOUT_S = 60


@dataclass
class ServerProcess:
    """A started server."""

    process: subprocess.Popen[str]
    url: str
    model: str

    def state(self) -> dict[str, Any]:
        """GET /cluster/state."""
        answer = httpx.get(f"{self.url}/cluster/state", timeout=30)
        assert answer.status_code == 200, answer.text
        state: dict[str, Any] = answer.json()
        return state

    def complete(self, prompt: object, **fields: object) -> dict[str, Any]:
        """POST /v1/completions, expecting success."""
        body = {"model": self.model, "prompt": prompt, **fields}
        answer = httpx.post(f"{self.url}/v1/completions", json=body, timeout=300)
        assert answer.status_code == 200, answer.text
        document: dict[str, Any] = answer.json()
        return document

    def descendants(self) -> list[psutil.Process]:
        """Every process that it started."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def wait_for_baseline(self, timeout_s: float = 5.0) -> dict[str, Any]:
        """Poll /cluster/state until every pool is at its baseline; fails with the last state."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            state = self.state()
            if is_at_baseline(state):
                return state
            assert time.monotonic() < deadline_s, json.dumps(state, indent=1)
            time.sleep(0.1)


def is_at_baseline(state: dict[str, Any]) -> bool:
    """Nothing runs or waits, and in every tier free + cached = total."""
    for worker in state["workers"]:
        if worker["running"] or worker["waiting"] or worker["ledger"]["attempts"]:
            return False
        for pages in worker["pages"].values():
            held = pages["in_use"] + pages["leased"] + pages["reserved"] + pages["quarantined"]
            if held or pages["free"] + pages["cached"] != pages["total"]:
                return False
    return bool(state["workers"])


def start_server(*arguments: str) -> ServerProcess:
    """Start and wait for the ready line."""
    command = [sys.executable, "-m", "serving.cli", "serve", "--port", "0", "--json", *arguments]
    # A file and not a pipe: nobody reads on once the server is ready, and a full pipe would stop it.
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, stdout=output, text=True, start_new_session=True)
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while True:
            output.seek(0)
            for line in output.read().splitlines():
                if line.startswith("{"):
                    ready = json.loads(line)
                    return ServerProcess(process, ready["url"], ready["model"])
            assert process.poll() is None, f"the server ended with {process.returncode} before it was ready"
            assert time.monotonic() < deadline_s, "no ready line"
            time.sleep(0.1)


@contextmanager
def running_server(*arguments: str) -> Iterator[ServerProcess]:
    """A server that is stopped by SIGINT, and proven to leave nothing."""
    server = start_server(*arguments)
    try:
        yield server
    finally:
        children = server.descendants()
        server.process.send_signal(signal.SIGINT)
        code = server.process.wait(STOP_TIMEOUT_S)
        _, alive = psutil.wait_procs(children, timeout=10)
        assert alive == []
        assert code == 0
