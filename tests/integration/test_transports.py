"""A pair of workers over every transport that needs no Ray: the same tokens, and nothing left."""

from pathlib import Path

import pytest

from configs import DeploymentConfig, load_deployment
from kvtransfer import TransportUnavailable
from kvtransfer.transports import nixl
from manager import Epoch, WorkerName
from scheduler.messages import WorkerRole
from scheduler.spec import SamplingParams
from serving.workers.transports import PREFERENCE, make_transport
from serving.workers.worker_plan import Surroundings, WorkerIdentity
from tests.fakes.deployments import Deployment
from tests.fakes.tiny_model import write_tiny_model

PROMPTS = [[5] * 3, list(range(3, 35)), list(range(3, 36)), list(range(40, 240))]
GENERATION = WorkerName("generation-0")
needs_nixl = pytest.mark.skipif(bool(nixl.why_unavailable()), reason=nixl.why_unavailable() or "it is here")


def _config(transport: str) -> DeploymentConfig:
    overrides: dict[str, dict[str, object]] = {
        "engine": {"dtype": "float32"},
        "router": {"local_prefill_max_tokens": 0},  # what is tested is the handoff
        "cache": {"tiers": [{"tier": "device", "quota_bytes": 4 << 20}], "max_sequences": 16},
        "scheduler": {"max_batch_size": 16},
        "transfer": {"transport": transport},
    }
    return load_deployment("local-cpu", overrides)


def _tokens(transport: str, model_folder: Path, folder: Path) -> list[list[int]]:
    folder.mkdir()
    deployment = Deployment(_config(transport), model_folder, folder)
    tokens = deployment.generate(PROMPTS, 12)
    tokens += deployment.generate([[*PROMPTS[3], 9]], 6, sampling=SamplingParams(temperature=0.9, seed=4))
    agent = deployment.cluster.workers[GENERATION].agent
    assert agent.counters()["receives_verified"] == len(PROMPTS) + 1
    assert agent.counters()["bytes_received"] == agent.counters()["bytes_verified"] > 0
    snapshot = deployment.cluster.workers[GENERATION].snapshot()
    expected = "shared_memory" if transport == "auto" else transport
    assert snapshot.transports == {"context-0": f"{expected} (the first choice)"}
    deployment.settle_down()
    deployment.close()
    assert list(folder.iterdir()) == []
    return tokens


@pytest.mark.parametrize("transport", ["auto", "collective", pytest.param("nixl", marks=needs_nixl)])
def test_tokens_do_not_depend_on_the_transport(transport: str, tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model")
    reference = _tokens("shared_memory", model, tmp_path / "reference")
    assert _tokens(transport, model, tmp_path / "other") == reference


def _make(choice: str, tmp_path: Path, surroundings: Surroundings) -> str:
    identity = WorkerIdentity(WorkerName("context-0"), WorkerRole.CONTEXT, Epoch(3), 1)
    made = make_transport(choice, identity, tmp_path / "pool", surroundings)
    names = " ".join(transport.name for transport in made.best._transports)
    made.best.close()
    return names


def test_auto_is_shared_memory_alone_where_all_workers_are_on_one_host(tmp_path: Path) -> None:
    assert _make("auto", tmp_path, Surroundings()) == "shared_memory"


@needs_nixl
def test_auto_has_every_transport_that_is_here_where_workers_may_be_elsewhere(tmp_path: Path) -> None:
    assert _make("auto", tmp_path, Surroundings(spans_hosts=True)) == " ".join(PREFERENCE[:3])
    assert _make("auto", tmp_path, Surroundings(namespace="deployment", spans_hosts=True)) == " ".join(PREFERENCE)


def test_a_transport_that_is_named_and_missing_stops_the_worker(tmp_path: Path) -> None:
    with pytest.raises(TransportUnavailable, match="without Ray"):
        _make("object_store", tmp_path, Surroundings())
