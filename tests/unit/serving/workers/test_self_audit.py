"""A running worker audits itself, and ends when its books are wrong (M6)."""

import time
from pathlib import Path

import pytest

from configs import ClusterConfig, DeploymentConfig
from manager import CorruptedError
from scheduler.messages import WorkerHeartbeat, WorkerState
from serving.inprocess import build_cluster
from serving.workers.self_audit import SelfAudit
from tests.fakes.tiny_model import write_tiny_model


class _Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_an_audit_runs_once_a_period() -> None:
    clock, ran_at_s = _Clock(), list[float]()
    audit = SelfAudit(lambda: ran_at_s.append(clock.now_s), period_s=10, max_share=0.01, clock=clock)
    for now_s in (100.0, 109.9, 110.0, 115.0, 119.9, 120.0):
        clock.now_s = now_s
        audit.run_if_due()
    assert ran_at_s == [110.0, 120.0]
    assert audit.num_audits == 2


def test_a_long_audit_keeps_to_its_share_of_the_time() -> None:
    clock = _Clock()

    def audit_for_two_seconds() -> None:
        clock.now_s += 2.0

    audit = SelfAudit(audit_for_two_seconds, period_s=10, max_share=0.01, clock=clock)
    clock.now_s = 110.0
    audit.run_if_due()
    clock.now_s = 311.9  # 2 s are a hundredth of 200 s
    audit.run_if_due()
    assert audit.num_audits == 1
    clock.now_s = 312.0
    audit.run_if_due()
    assert audit.num_audits == 2


def test_a_period_of_zero_switches_audits_off() -> None:
    clock = _Clock()
    audit = SelfAudit(pytest.fail, period_s=0, max_share=0.01, clock=clock)
    clock.now_s = 1e9
    audit.run_if_due()
    assert audit.num_audits == 0


def test_a_worker_with_wrong_books_is_fenced_by_its_last_word(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "model")
    config = DeploymentConfig(cluster=ClusterConfig(context_workers=0, generation_workers=0, mixed_workers=1))
    cluster = build_cluster(config, folder, tmp_path)
    (worker,) = cluster.workers.values()
    sent: list[WorkerHeartbeat] = []
    exits: list[int] = []
    original = cluster.central.heartbeat

    def note(heartbeat: WorkerHeartbeat, now_s: float) -> object:
        sent.append(heartbeat)
        return original(heartbeat, now_s)

    cluster.central.heartbeat = note  # type: ignore[method-assign, assignment]

    def corrupted() -> None:
        msg = "slots of store 0: lost [3]"
        raise CorruptedError(msg)

    worker.self_audit = SelfAudit(corrupted, period_s=0.01, max_share=1.0, clock=time.monotonic)
    worker.start(on_fatal=lambda: exits.append(70))
    try:
        worker.join(timeout_s=20)
        assert exits == [70]
        assert sent[-1].snapshot.state is WorkerState.CORRUPTED
        state = cluster.central.state(time.monotonic())
        assert state["counters"]["audit_violations"] == 1
        assert state["workers"][0]["state"] == "lost"
        assert "corrupted" in state["workers"][0]["lost_reason"]
    finally:
        cluster.close()
