"""A worker that is told to stop in the middle of a step (I6)."""

import threading
from pathlib import Path

import pytest

from configs import load_deployment
from serving.engine.batch import StepBatch, StepResult
from serving.engine.runner import Engine
from tests.fakes.deployments import Deployment
from tests.fakes.tiny_model import write_tiny_model


def test_a_worker_that_cannot_end_its_step_keeps_its_memory_until_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pools = tmp_path / "pools"
    pools.mkdir()
    small: dict[str, object] = {"tiers": [{"tier": "device", "quota_bytes": 4 << 20}]}
    config = load_deployment("local-mixed", {"engine": {"dtype": "float32"}, "cache": small})
    deployment = Deployment(config, write_tiny_model(tmp_path / "model"), pools)
    started, may_end = threading.Event(), threading.Event()
    step = Engine.step

    def slow_step(engine: Engine, batch: StepBatch) -> StepResult:
        started.set()
        assert may_end.wait(30)
        return step(engine, batch)

    monkeypatch.setattr(Engine, "step", slow_step)
    (worker,) = deployment.cluster.workers.values()
    worker.start(on_fatal=lambda: pytest.fail("the loop died"))
    deployment.submit([3, 4, 5], 1)
    deployment.cluster.central.tick(0.0)
    deployment.cluster.deliver()
    assert started.wait(10)

    assert not worker.stop(timeout_s=0.05)
    assert list(pools.iterdir()) != []
    may_end.set()
    assert worker.stop(timeout_s=10)
    assert list(pools.iterdir()) == []
