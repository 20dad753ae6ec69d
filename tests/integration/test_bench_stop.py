"""A bench that is told to end takes the servers that it started with it."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

# What a shell starts in the background ignores SIGINT, and so does all that it starts in turn.
_SLEEPER = """#!/bin/sh
trap '' INT
echo $$ > {pid_file}
exec sleep 600
"""


def test_a_terminated_bench_ends_its_servers(tmp_path: Path) -> None:
    pid_file, sleeper = tmp_path / "pid", tmp_path / "python-with-vllm"
    sleeper.write_text(_SLEEPER.format(pid_file=pid_file))
    sleeper.chmod(0o755)
    options = ["--deployments", "vllm", "--vllm", str(sleeper), "--model", str(tmp_path), "--logs", str(tmp_path)]
    bench = subprocess.Popen([sys.executable, "-m", "serving.cli", "bench", "compare", *options])
    try:
        deadline_s = time.monotonic() + 60
        while not (pid_file.exists() and pid_file.read_text().strip()):
            assert time.monotonic() < deadline_s
            assert bench.poll() is None
            time.sleep(0.05)
        bench.send_signal(signal.SIGTERM)
        assert bench.wait(60) == 128 + signal.SIGTERM
        assert not psutil.pid_exists(int(pid_file.read_text()))
    finally:
        bench.kill()
        if pid_file.exists() and psutil.pid_exists(pid := int(pid_file.read_text())):
            psutil.Process(pid).kill()
