"""The central scheduler's process before its term has begun: what comes early waits, and is not answered wrongly."""

import asyncio
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from configs import DeploymentConfig
from kvtransfer.errors import PeerError
from scheduler.spec import DoorName
from serving.actors.central_actor import CentralActor
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
    actor = CentralActor(ActorPlace("test", tmp_path, logging.CRITICAL), DeploymentConfig(), ["door-0"])
    actor._directory = _Nobody()  # type: ignore[assignment]
    return actor


@run_async
async def test_a_submission_before_the_term_begins_waits_and_is_not_refused_for_want_of_workers(tmp_path: Path) -> None:
    actor = _actor(tmp_path)
    submitting = asyncio.create_task(actor.submit(DoorName("door"), [make_spec("a")]))
    await asyncio.sleep(0.01)
    assert not submitting.done()
    await actor.look()
    assert (await submitting).refused == ()
    assert (await actor.state())["central"]["queued"] == 1


@run_async
async def test_a_door_that_beats_before_the_term_begins_is_heard_when_it_has_begun(tmp_path: Path) -> None:
    actor = _actor(tmp_path)
    beating = asyncio.create_task(actor.door_heartbeat(DoorName("door")))
    await asyncio.sleep(0.01)
    assert not beating.done()
    await actor.look()
    await beating
