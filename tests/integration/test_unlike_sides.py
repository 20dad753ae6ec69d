"""Workers whose pages have unlike block sizes: pages are re-laid out, and no token differs."""

import itertools
from pathlib import Path

import pytest

from configs import DeploymentConfig, load_deployment
from manager import WorkerName
from scheduler.messages import ErrorKind
from scheduler.spec import SamplingParams
from tests.fakes.deployments import Deployment
from tests.fakes.tiny_model import write_tiny_model

SIZES = (16, 32, 64)
PROMPTS = [[5] * 3, list(range(3, 35)), list(range(3, 36)), list(range(40, 240)), [*range(40, 230), 7, 8]]
GENERATION = WorkerName("generation-0")


def _config(block: int, dtype: str = "float32") -> DeploymentConfig:
    return load_deployment(
        "local-cpu",
        {
            "engine": {"dtype": dtype},
            "router": {"local_prefill_max_tokens": 0},  # what is tested is the handoff
            "cache": {
                "tiers": [{"tier": "device", "quota_bytes": 8 << 20}],
                "max_sequences": 16,
                "tokens_per_block": block,
            },
            "scheduler": {"max_batch_size": 16},
        },
    )


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        "full": write_tiny_model(tmp_path_factory.mktemp("full")),
        "windowed": write_tiny_model(tmp_path_factory.mktemp("windowed"), num_layers=2, layer_windows=(70, None)),
    }


def _tokens(model: Path, folder: Path, context: int, generation: int) -> list[list[int]]:
    folder.mkdir()
    config_of = {"context-0": _config(context), "generation-0": _config(generation)}
    deployment = Deployment(_config(context), model, folder, config_of=config_of)
    tokens = deployment.generate(PROMPTS, 20)
    tokens += deployment.generate(PROMPTS[2:], 20, sampling=SamplingParams(temperature=0.9, seed=3))
    assert deployment.cluster.workers[GENERATION].agent.counters()["receives_verified"] == len(PROMPTS) * 2 - 2
    deployment.settle_down()
    deployment.close()
    return tokens


@pytest.mark.parametrize("model", ["full", "windowed"])
def test_tokens_are_the_same_for_every_pair_of_block_sizes(
    model: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    found = {
        pair: _tokens(folders[model], tmp_path / "-".join(map(str, pair)), *pair)
        for pair in itertools.product(SIZES, SIZES)
    }
    assert [pair for pair, tokens in found.items() if tokens != found[16, 16]] == []


def test_a_pair_that_does_not_fit_ends_the_request_with_the_name_of_the_field(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    config_of = {"context-0": _config(16), "generation-0": _config(24)}
    deployment = Deployment(_config(16), folders["full"], tmp_path, config_of=config_of)
    uid = deployment.submit(PROMPTS[3], 4)
    while not deployment.notices and deployment.pump():
        pass
    (notice,) = deployment.notices
    assert (notice.uid, notice.kind) == (uid, ErrorKind.TRANSFER)
    assert "tokens_per_block is 24 here and 16 at the peer" in notice.message
    deployment.settle_down()
    deployment.close()
