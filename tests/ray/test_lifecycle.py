"""Start, stop and crash of a real server: nothing is left behind."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from serving.run_folder import RUN_ID_VARIABLE, run_root
from tests.ray.server_process import running_server, start_server

pytestmark = [pytest.mark.ray, pytest.mark.model, pytest.mark.timeout(600)]


def test_after_kill_9_the_next_start_removes_everything_of_the_first_run() -> None:
    runs_before = _runs()
    first = start_server("--config", "local-mixed")
    (folder,) = _runs() - runs_before
    first.process.send_signal(signal.SIGKILL)
    first.process.wait(10)
    with running_server("--config", "local-mixed") as second:
        assert second.complete("Hello", max_tokens=2)["choices"]
        assert not folder.exists()
        left = [process for process in psutil.process_iter() if _run_id(process) == folder.name]
        assert left == []
    assert _runs() == runs_before


def test_a_signal_during_the_start_ends_everything_that_was_started() -> None:
    runs_before = _runs()
    command = [sys.executable, "-m", "serving.cli", "serve", "--config", "local-mixed", "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    deadline_s = time.monotonic() + 60
    while len(psutil.Process(process.pid).children(recursive=True)) < 6:
        assert time.monotonic() < deadline_s, "Ray did not start"
        time.sleep(0.05)
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) != 0  # which code depends on whether Ray has put its own handler in place
    _, alive = psutil.wait_procs(children, timeout=10)
    assert alive == []
    assert _runs() == runs_before


def test_a_port_that_is_taken_is_one_line_and_no_stack_trace() -> None:
    with running_server("--config", "local-mixed") as server:
        port = server.url.rsplit(":", 1)[1]
        command = [sys.executable, "-m", "serving.cli", "serve", "--config", "local-mixed", "--port", port]
        second = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert second.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port}" in second.stderr
    assert "Traceback" not in second.stderr


def _runs() -> set[Path]:
    root = run_root()
    return set(root.iterdir()) if root.is_dir() else set()


def _run_id(process: psutil.Process) -> str | None:
    try:
        return process.environ().get(RUN_ID_VARIABLE)
    except psutil.Error:
        return None
