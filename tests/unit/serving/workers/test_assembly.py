"""What building a worker does to its surroundings."""

from pathlib import Path

import pytest

from configs import ClusterConfig, DeploymentConfig, DeviceTierConfig, KVCacheConfig, SchedulerConfig
from manager import CacheConfigError
from scheduler.messages import WorkerRole
from serving.inprocess import build_cluster
from serving.workers.worker_plan import worker_names
from tests.fakes.tiny_model import write_tiny_model


def _config(quota_bytes: int) -> DeploymentConfig:
    return DeploymentConfig(
        cluster=ClusterConfig(context_workers=0, generation_workers=0, mixed_workers=1),
        cache=KVCacheConfig(tiers=(DeviceTierConfig(quota_bytes=quota_bytes),), max_sequences=8),
        scheduler=SchedulerConfig(max_batch_size=8),
    )


def test_names_count_within_a_role() -> None:
    names = list(worker_names(ClusterConfig(context_workers=2, generation_workers=1)))
    assert names == [
        ("context-0", WorkerRole.CONTEXT),
        ("context-1", WorkerRole.CONTEXT),
        ("generation-0", WorkerRole.GENERATION),
    ]


def test_the_pool_of_a_killed_life_is_removed_by_the_next(tmp_path: Path) -> None:
    pools = tmp_path / "pools"
    pools.mkdir()
    left_behind = pools / "mixed-0-77.pool"
    left_behind.write_bytes(b"pages")
    (pools / "mixed-00-77.pool").write_bytes(b"another worker's")
    cluster = build_cluster(_config(4 << 20), write_tiny_model(tmp_path / "model"), pools)
    assert sorted(path.name for path in pools.iterdir()) == ["mixed-0-1.pool", "mixed-00-77.pool"]
    cluster.close()
    cluster.close()
    assert [path.name for path in pools.iterdir()] == ["mixed-00-77.pool"]


def test_a_quota_that_cannot_work_is_refused_with_its_numbers(tmp_path: Path) -> None:
    with pytest.raises(CacheConfigError, match=r"\d+"):
        build_cluster(_config(1000), write_tiny_model(tmp_path / "model"), tmp_path)
