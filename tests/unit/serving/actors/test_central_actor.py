"""The central scheduler's process before its term has begun: what comes early is not answered wrongly."""

import asyncio
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from configs import DeploymentConfig
from kvtransfer.errors import PeerError
from manager import Epoch, WorkerName
from scheduler.messages import WorkerRegistration, WorkerRole
from scheduler.spec import DoorName
from serving.actors.central_actor import CentralActor, NotLeadingError
from serving.actors.directory import ActorPlace
from tests.fakes.central_world import make_spec
from tests.fakes.door import run_async


@pytest.fixture(autouse=True)
def _keeps_the_switch_interval() -> Iterator[None]:
    before_s = sys.getswitchinterval()
    yield
    sys.setswitchinterval(before_s)


class _Nobody:
    """A directory in which nobody is found."""

    def find(self, name: str) -> Any:
        raise PeerError(name)


def _actor(tmp_path: Path) -> CentralActor:
    actor = CentralActor(ActorPlace("test", tmp_path, logging.CRITICAL), "central-0", DeploymentConfig(), ["door-0"])
    actor._directory = _Nobody()  # type: ignore[assignment]
    return actor


class _Somebody:
    """An actor's handle that remembers what it was called."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[object, ...]]] = []

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=lambda *arguments: self.calls.append((method, arguments)))


class _Everybody:
    """A directory in which everybody is found."""

    def __init__(self) -> None:
        self.handles: dict[str, _Somebody] = {}

    def find(self, name: str) -> _Somebody:
        return self.handles.setdefault(name, _Somebody())

    def forget(self, name: str) -> None:
        """They stay."""


@run_async
async def test_one_that_stands_by_refuses_submissions_by_name_instead_of_for_want_of_workers(tmp_path: Path) -> None:
    actor = _actor(tmp_path)
    for ask in (actor.submit(DoorName("door"), [make_spec("a")]), actor.state(), actor.health()):
        with pytest.raises(NotLeadingError, match="central-0 stands by"):
            await ask
    await actor.look()
    assert (await actor.submit(DoorName("door"), [make_spec("a")])).refused == ()
    assert (await actor.state())["central"]["queued"] == 1


@run_async
async def test_what_one_that_stands_by_hears_is_asked_for_again_when_its_term_begins(tmp_path: Path) -> None:
    actor = _actor(tmp_path)
    actor._directory = everybody = _Everybody()  # type: ignore[assignment]
    await actor.door_heartbeat(DoorName("door-0"))
    assert everybody.handles == {}
    await actor.look()
    asked = {name: [method for method, _ in handle.calls] for name, handle in everybody.handles.items()}
    assert sorted(asked) == ["context-0", "door-0", "generation-0"]
    assert all(methods == ["introduce"] for methods in asked.values())
    await actor.claim(DoorName("door-0"), ())
    method, (name, term) = everybody.handles["door-0"].calls[-1]
    assert (method, name) == ("follow_central", "central-0")
    assert term == actor._leading().term


@run_async
async def test_a_term_does_not_wait_for_workers_whose_processes_are_gone(tmp_path: Path) -> None:
    actor = _actor(tmp_path)
    await actor.look((), [WorkerName("context-0"), WorkerName("generation-0")])
    await actor.claim(DoorName("door-0"), ())
    assert not (await actor.state())["central"]["is_taking_over"]


@run_async
async def test_what_the_supervisor_tells_before_the_first_look_waits_for_it(tmp_path: Path) -> None:
    actor = _actor(tmp_path)
    telling = asyncio.create_task(actor.worker_gone(WorkerName("context-0"), 1, "dead"))
    await asyncio.sleep(0.01)
    assert not telling.done()
    await actor.look()
    await telling


_REGISTRATION = WorkerRegistration(WorkerName("context-0"), WorkerRole.CONTEXT, Epoch(7), 100, 50)


class _Starting:
    """A worker's actor to which Ray has no way yet when it registers."""

    def __init__(self, epoch: Epoch, num_lost: int) -> None:
        self.follow_central = SimpleNamespace(remote=self._answer)
        self.introduce = SimpleNamespace(remote=lambda *_: None)
        self._epoch = epoch
        self._num_lost = num_lost

    async def _answer(self, *_: object) -> Epoch:
        self._num_lost -= 1
        if self._num_lost >= 0:
            raise ray.exceptions.RayError
        return self._epoch


class _OnlyOne(_Everybody):
    def __init__(self, handle: _Starting) -> None:
        super().__init__()
        self.handle = handle

    def find(self, name: str) -> Any:
        return self.handle if name == "context-0" else super().find(name)


@pytest.mark.parametrize(("heard_by", "workers"), [(Epoch(7), ["context-0"]), (Epoch(8), [])])
@run_async
async def test_a_worker_is_given_nothing_before_its_present_life_can_be_reached(
    heard_by: Epoch, workers: list[str], tmp_path: Path
) -> None:
    actor = _actor(tmp_path)
    actor._directory = _OnlyOne(_Starting(heard_by, num_lost=2))  # type: ignore[assignment]
    await actor.look()
    registering = asyncio.create_task(actor.register_worker(_REGISTRATION))
    await asyncio.sleep(0.01)
    assert (await actor.state())["workers"] == []
    await registering
    assert [worker["name"] for worker in (await actor.state())["workers"]] == workers
