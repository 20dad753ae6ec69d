"""The watch of processes, over real ones."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from serving.process_watch import ProcessLoss, ProcessWatch


@pytest.fixture
def sleeper() -> Iterator["subprocess.Popen[bytes]"]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield process
    process.kill()
    process.wait()


def _wait_for(watch: ProcessWatch, now_s: float) -> list[ProcessLoss]:
    deadline_s = time.monotonic() + 5
    while not (losses := watch.look(now_s)):
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    return losses


def test_a_killed_process_is_told_once(sleeper: "subprocess.Popen[bytes]") -> None:
    watch = ProcessWatch()
    watch.follow("worker", sleeper.pid, 0.5)
    assert watch.look(0.0) == []
    sleeper.kill()
    (loss,) = _wait_for(watch, 1.0)
    assert (loss.name, loss.pid, loss.is_stopped) == ("worker", sleeper.pid, False)
    assert watch.look(2.0) == []
    assert watch.pid("worker") is None


def test_a_stopped_process_is_lost_only_when_it_stays_stopped(sleeper: "subprocess.Popen[bytes]") -> None:
    watch = ProcessWatch()
    watch.follow("worker", sleeper.pid, 0.5)
    sleeper.send_signal(signal.SIGSTOP)
    time.sleep(0.1)
    assert watch.look(0.0) == []
    assert watch.look(0.4) == []
    sleeper.send_signal(signal.SIGCONT)
    time.sleep(0.1)
    assert watch.look(0.6) == []
    sleeper.send_signal(signal.SIGSTOP)
    time.sleep(0.1)
    assert watch.look(0.7) == []
    (loss,) = watch.look(1.3)
    assert loss.is_stopped
    assert "stopped for 0.60 s" in loss.reason


def test_following_the_next_life_begins_anew(sleeper: "subprocess.Popen[bytes]") -> None:
    watch = ProcessWatch()
    first = subprocess.Popen([sys.executable, "-c", "pass"])
    first.wait()
    watch.follow("worker", first.pid, 0.5)  # gone already: nothing to watch
    assert watch.look(0.0) == []
    watch.follow("worker", sleeper.pid, 0.5)
    assert watch.pid("worker") == sleeper.pid
    assert watch.look(1.0) == []
