"""The server under test: `pdserve serve` in a process of its own."""

import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

_START_TIMEOUT_S = 300.0
_STOP_TIMEOUT_S = 60.0
_VIOLATIONS = ("CorruptedError", "LogicError", "the loop died", "the ledger is wrong")


@dataclass(frozen=True, slots=True)
class Server:
    """A server that is ready."""

    url: str
    model: str
    log: IO[str]

    def log_lines(self) -> list[str]:
        """Everything that it and its processes logged so far."""
        self.log.flush()
        self.log.seek(0)
        return self.log.read().splitlines()

    def violations(self) -> list[str]:
        """Lines that tell of a broken invariant."""
        return [line for line in self.log_lines() if any(word in line for word in _VIOLATIONS)]


@contextmanager
def running_server(config: Path, log_file: Path) -> Iterator[Server]:
    """Start it with its log in a file, and stop it by SIGTERM. Raises RuntimeError when it does not become ready."""
    command = [sys.executable, "-m", "serving.cli", "serve", "--config", str(config), "--json"]
    with tempfile.TemporaryFile("w+") as output, log_file.open("w+") as log:
        process = subprocess.Popen(command, stdout=output, stderr=log, text=True, start_new_session=True)
        try:
            ready = _wait_until_ready(process, output)
            yield Server(ready["url"], ready["model"], log)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_until_ready(process: "subprocess.Popen[str]", output: IO[str]) -> dict[str, str]:
    deadline_s = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline_s and process.poll() is None:
        output.seek(0)
        for line in output.read().splitlines():
            if line.startswith("{"):
                ready: dict[str, str] = json.loads(line)
                return ready
        time.sleep(0.1)
    msg = f"the server was not ready after {_START_TIMEOUT_S:.0f} s (exit code {process.poll()})"
    raise RuntimeError(msg)
