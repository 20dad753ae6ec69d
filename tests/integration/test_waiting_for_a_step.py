"""What comes to a worker that is in a step waits in its queue, and its timeline says so."""

from collections.abc import Callable
from pathlib import Path

from configs import load_deployment
from serving.engine.batch import StepBatch, StepResult
from serving.workers.step_engine import StepEngine
from tests.fakes.deployments import DOOR, Deployment
from tests.fakes.tiny_model import write_tiny_model

_STEP_S = 3.0


class _EngineWithEvents:
    """The real engine; its first step is long, and something happens at its beginning."""

    def __init__(self, engine: StepEngine, in_first_step: Callable[[], None]) -> None:
        self._engine = engine
        self._in_first_step: Callable[[], None] | None = in_first_step

    def step(self, batch: StepBatch) -> StepResult:
        happens, self._in_first_step = self._in_first_step, None
        if happens is not None:
            happens()
        return self._engine.step(batch)


def test_a_command_that_comes_during_a_step_is_queued_from_then_on(tmp_path: Path) -> None:
    now_s = [100.0]
    config = load_deployment("local-mixed", {"engine": {"dtype": "float32"}})
    deployment = Deployment(config, write_tiny_model(tmp_path / "model"), tmp_path, clock=lambda: now_s[0])
    (worker,) = deployment.cluster.workers.values()
    parts = worker._loop._parts

    def submit_another() -> None:
        deployment.submit(range(20, 30), 2)
        deployment.cluster.deliver()
        now_s[0] += _STEP_S

    object.__setattr__(parts, "engine", _EngineWithEvents(parts.engine, submit_another))
    deployment.submit(range(3, 13), 2)
    queued: dict[str, float] = {}
    while len(queued) < 2:
        deployment.cluster.pump()
        for batch in deployment.cluster.take_tokens():
            assert batch.door == DOOR
            for event in batch.events:
                if event.durations is not None and event.position == 0:
                    queued[event.uid] = event.durations.phases["queue"]
    assert list(queued.values()) == [0.0, _STEP_S]
    deployment.close()
