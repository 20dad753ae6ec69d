"""The supervisor outlives every race with a dying process."""

import subprocess
import sys
from types import SimpleNamespace

import psutil
import pytest
import ray

from configs import CentralConfig
from serving.actors.directory import CENTRAL_NAME
from serving.supervisor import Supervisor


def test_a_process_that_dies_while_it_is_being_ended_does_not_end_the_supervisor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    supervisor = Supervisor(
        [SimpleNamespace()], {}, {"context-0": SimpleNamespace()}, CentralConfig(), owns_processes=True
    )
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    dying = psutil.Process(child.pid)
    # It is found among the children, and is gone before it can be killed.
    monkeypatch.setattr(supervisor, "_own_process", lambda _: dying)
    child.communicate()
    supervisor._end("context-0", child.pid, "silent")


class _Central:
    """The handle of a central scheduler that answers when it is told to."""

    def __init__(self, name: str, asked: list[tuple[str, str]]) -> None:
        self.look = SimpleNamespace(remote=lambda *_: asked.append((name, "look")))
        self.stand_by = SimpleNamespace(remote=lambda: asked.append((name, "stand_by")))


def test_when_the_central_scheduler_dies_the_one_that_stands_by_is_looked_at_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[str, str]] = []
    monkeypatch.setattr(ray, "wait", lambda references, timeout: ([], references))
    supervisor = Supervisor(
        [_Central("first", asked), _Central("second", asked)], {"door-0": SimpleNamespace(look=_Never())}, {},
        CentralConfig(), owns_processes=True,
    )  # fmt: skip
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    supervisor.watch()
    assert asked == [("first", "look"), ("second", "stand_by")]
    supervisor._processes.follow(CENTRAL_NAME, child.pid, 0.5)
    child.kill()
    child.communicate()
    supervisor.watch()
    assert asked[2:] == [("second", "look"), ("first", "stand_by")]


class _Never:
    """A question that is never answered."""

    def remote(self) -> object:
        return object()
