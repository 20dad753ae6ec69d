"""The supervisor outlives every race with a dying process."""

import subprocess
import sys
from types import SimpleNamespace

import psutil
import pytest

from configs import CentralConfig
from serving.supervisor import Supervisor


def test_a_process_that_dies_while_it_is_being_ended_does_not_end_the_supervisor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    supervisor = Supervisor(
        SimpleNamespace(), {}, {"context-0": SimpleNamespace()}, CentralConfig(), owns_processes=True
    )
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    dying = psutil.Process(child.pid)
    # It is found among the children, and is gone before it can be killed.
    monkeypatch.setattr(supervisor, "_own_process", lambda _: dying)
    child.communicate()
    supervisor._end("context-0", child.pid, "silent")
