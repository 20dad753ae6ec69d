"""Pools so small that running requests lose their pages again and again: the tokens do not change (I15)."""

import itertools
from collections import Counter
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from configs import DeploymentConfig, load_deployment
from manager.pools.numpy_pools import NumpyPool
from scheduler.spec import SamplingParams
from tests.fakes.deployments import Deployment
from tests.fakes.tiny_model import write_tiny_model

_PAGE_BYTES = 2 * 2 * 2 * 16 * 16 * 4  # layers, K and V, KV heads, tokens, head_dim, float32
_PROMPTS = [[(7 * n + k) % 250 + 3 for k in range(4 + 3 * n)] for n in range(6)]
_NUM_TOKENS = 60


def _config(num_pages: int, *, mixed: bool, lower: tuple[str, ...] = (), dtype: str = "float32") -> DeploymentConfig:
    quota_bytes = num_pages * _PAGE_BYTES // (1 if dtype == "float32" else 2)
    tiers = [{"tier": tier, "quota_bytes": quota_bytes * (1 if tier == "device" else 2)} for tier in ("device", *lower)]
    overrides: dict[str, dict[str, object]] = {
        "engine": {"dtype": dtype},
        "cache": {"tiers": tiers, "max_sequences": 6},
        "scheduler": {"max_batch_size": 6, "max_num_tokens": 64, "chunk_unit_tokens": 16},
        "router": {"local_prefill_max_tokens": 0},  # what is tested is the handoff
    }
    return load_deployment("local-mixed" if mixed else "local-cpu", overrides)


def _run(
    config: DeploymentConfig, folder: Path, pools: Path, sampling: SamplingParams
) -> tuple[list[list[int]], Counter[str]]:
    """The tokens of all prompts, and the counters of all workers together."""
    pools.mkdir()
    deployment = Deployment(config, folder, pools)
    tokens = deployment.generate(_PROMPTS, _NUM_TOKENS, sampling=sampling)
    counts: Counter[str] = Counter()
    for worker in deployment.cluster.workers.values():
        counts.update(worker.snapshot().counters)
    deployment.settle_down()
    deployment.close()
    assert list(pools.iterdir()) == []
    return tokens, counts


@pytest.mark.parametrize("sampling", [SamplingParams(temperature=0.0), SamplingParams(temperature=1.0, seed=5)])
@pytest.mark.parametrize("mixed", [True, False])
def test_requests_that_lose_their_pages_give_the_tokens_of_an_ample_pool(
    sampling: SamplingParams, mixed: bool, tmp_path: Path
) -> None:
    folder = write_tiny_model(tmp_path / "model")
    ample, none = _run(_config(400, mixed=mixed), folder, tmp_path / "ample", sampling)
    small, counts = _run(_config(8, mixed=mixed), folder, tmp_path / "small", sampling)
    assert small == ample
    assert none["recomputes"] == 0
    # Offers leave room for what runs, so a generation worker has to give up less often than a mixed one.
    assert counts["recomputes"] >= (3 if mixed else 2), "the pool was not small enough to prove anything"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("lower", [("host",), ("disk",), ("host", "disk")])
def test_requests_that_go_through_lower_tiers_give_the_tokens_of_an_ample_pool(
    dtype: str, lower: tuple[str, ...], tmp_path: Path
) -> None:
    folder = write_tiny_model(tmp_path / "model")
    sampling = SamplingParams(temperature=1.0, seed=9)
    ample, _ = _run(_config(400, mixed=True, dtype=dtype), folder, tmp_path / "ample", sampling)
    config = _config(8, mixed=True, lower=lower, dtype=dtype)
    small, counts = _run(config, folder, tmp_path / "small", sampling)
    assert small == ample
    assert counts["suspensions"] >= 3
    assert counts["resumes"] >= 3


def test_a_page_that_does_not_come_back_from_a_lower_tier_is_computed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_tiny_model(tmp_path / "model")
    sampling = SamplingParams(temperature=0.0)
    ample, _ = _run(_config(400, mixed=True), folder, tmp_path / "ample", sampling)
    reads = itertools.count()
    read = NumpyPool.read

    def failing_read(pool: NumpyPool, slot: int, out: npt.NDArray[np.uint8]) -> None:
        if next(reads) % 3 == 0:
            message = "injected"
            raise OSError(message)
        read(pool, slot, out)

    monkeypatch.setattr(NumpyPool, "read", failing_read)
    small, counts = _run(_config(8, mixed=True, lower=("host",)), folder, tmp_path / "small", sampling)
    assert small == ample
    assert counts["lost_pages"] >= 1
