"""A central scheduler that is stopped, succeeded and woken up: what it still commands is refused and counted (C6).

The supervisor would have ended it meanwhile, so real actors run here without one.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from configs import load_deployment
from scheduler.messages import TokenBatch, WorkerRole
from scheduler.spec import DoorName, RequestSpec, RequestUid, SamplingParams, StopParams, Term
from serving.actors.central_actor import CentralActor
from serving.actors.directory import CENTRAL_ACTORS, ActorPlace
from serving.actors.worker_actor import WorkerActor
from serving.workers.worker_plan import WorkerPlan
from tests.contract.object_keeper import NAMESPACE, running_keeper
from tests.fakes.tiny_model import write_tiny_model

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

_DOOR = DoorName("door-0")
_PATIENCE_S = 60.0


class _Door:
    """Owns nothing that outlives a term, and keeps the tokens that come."""

    def __init__(self) -> None:
        self._tokens: dict[str, list[int]] = {}

    def introduce(self, actor: str, term: Term) -> None:
        ray.get_actor(actor, namespace=NAMESPACE).claim.remote(_DOOR, ())

    def follow_central(self, actor: str, term: Term) -> None:
        """It is told whom to ask by the test."""

    def on_tokens(self, batch: TokenBatch) -> None:
        for event in batch.events:
            self._tokens.setdefault(event.uid, []).append(event.token_id)

    def on_notices(self, term: Term, notices: object) -> None:
        """The test looks at tokens."""

    def tokens(self, uid: str) -> list[int]:
        return self._tokens.get(uid, [])


@pytest.fixture(scope="module")
def namespace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running_keeper(tmp_path_factory.mktemp("ray")):
        yield NAMESPACE


def _start(cls: type, name: str, *arguments: object) -> Any:
    return ray.remote(cls).options(name=name, namespace=NAMESPACE, num_cpus=0).remote(*arguments)


def _spec(uid: str) -> RequestSpec:
    sampling, stop = SamplingParams(temperature=0.9, seed=5), StopParams(max_tokens=6, ignore_eos=True)
    return RequestSpec(RequestUid(uid), _DOOR, tuple(range(3, 20)), sampling, stop)


def _wait_for(condition: Callable[[], Any]) -> Any:
    deadline_s = time.monotonic() + _PATIENCE_S
    while not (met := condition()):
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    return met


def _worker(central: Any) -> dict[str, Any] | None:
    """What the central scheduler says of the only worker, once it is registered and somebody is served."""
    state = ray.get(central.state.remote())
    workers: list[dict[str, Any]] = state["workers"]
    return workers[0] if workers and not state["central"]["is_taking_over"] else None


def test_a_woken_central_scheduler_of_an_old_term_is_refused_by_the_workers(namespace: str, tmp_path: Path) -> None:
    place = ActorPlace(namespace, tmp_path)
    config = load_deployment("local-mixed", {"engine": {"dtype": "float32"}})
    door = _start(_Door, _DOOR)
    first, second = (_start(CentralActor, name, place, name, config, [_DOOR]) for name in CENTRAL_ACTORS)
    ray.get(first.look.remote())
    plan = WorkerPlan(config, write_tiny_model(tmp_path / "model"), tmp_path)
    worker = _start(WorkerActor, "mixed-0", place, plan, "mixed-0", WorkerRole.MIXED)
    _wait_for(lambda: _worker(first))
    ray.get(first.submit.remote(_DOOR, [_spec("a")]))
    tokens = _wait_for(lambda: len(got := ray.get(door.tokens.remote("a"))) == 6 and got)

    pid = ray.get(first.state.remote())["central"]["pid"]
    os.kill(pid, signal.SIGSTOP)
    try:
        late = first.submit.remote(_DOOR, [_spec("late")])  # heard when it wakes up
        time.sleep(2 * config.central.heartbeat_s * config.central.missed_heartbeats)
        ray.get(second.look.remote())
        _wait_for(lambda: _worker(second))
        ray.get(second.submit.remote(_DOOR, [_spec("b")]))
        assert _wait_for(lambda: len(got := ray.get(door.tokens.remote("b"))) == 6 and got) == tokens
    finally:
        os.kill(pid, signal.SIGCONT)
    ray.get(late)
    _wait_for(lambda: (seen := _worker(second)) and seen["counters"]["refused_terms"])
    assert ray.get(door.tokens.remote("late")) == []
    counters = ray.get(second.state.remote())["counters"]
    assert (counters["divergences"], counters["lost_workers"]) == (0, 0)
    with pytest.raises(ray.exceptions.RayActorError):  # it has lost its term, and says so by ending
        ray.get(first.stand_by.remote())
    ray.get(worker.stop.remote())
