"""What must hold on a device, the same on the CPU: E1, and mixed == disaggregated over two processes.

The CPU runs are part of `make test`, so that the file is known to work; the CUDA runs carry the marker
`gpu`. `scripts/device_check.sh` runs those where only torch, transformers, safetensors and pytest are.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from configs import (
    CentralConfig,
    ClusterConfig,
    DeploymentConfig,
    DeviceTierConfig,
    DispatchPolicy,
    DTypeName,
    EngineConfig,
    KVCacheConfig,
    TransferConfig,
)
from kvtransfer.transports import nixl
from scheduler.spec import RequestSpec, RequestUid, SamplingParams, StopParams
from serving.engine.batch import StepBatch
from serving.engine.model_folder import load_model_config
from serving.engine.runner import Engine
from serving.engine.weights import load_weights
from tests.fakes.deployments import Deployment
from tests.fakes.engine_rows import GROUP, HandFedSequence, run_in_chunks
from tests.fakes.tiny_model import write_tiny_model
from tests.gpu.pair_of_processes import DOOR, PairOfProcesses

SMOLLM2_SHAPES: dict[str, Any] = {
    "num_layers": 30,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_heads": 9,
    "num_kv_heads": 3,
    "head_dim": 64,
    "vocab_size": 49_152,
    "max_position": 8192,
    "rope_theta": 100_000.0,
}
_PAIR = ClusterConfig(context_workers=1, generation_workers=1)
_NEVER_SILENT = 1_000_000  # one thread drives everything here, so no heartbeat comes during a step


@dataclass(frozen=True)
class Place:
    """A device and a model of a size that suits it."""

    device: str
    folder: Path

    def config(self, dtype: str, cluster: ClusterConfig = _PAIR) -> DeploymentConfig:
        """A small deployment there; disaggregated unless `cluster` says otherwise."""
        return DeploymentConfig(
            cluster=cluster,
            engine=EngineConfig(dtype=DTypeName(dtype), device=self.device),
            cache=KVCacheConfig(tiers=(DeviceTierConfig(quota_bytes=200 << 20),)),
            central=CentralConfig(missed_heartbeats=_NEVER_SILENT),
            transfer=TransferConfig(lease_duration_s=600.0),  # nor is a lease renewed during a step
        )

    def networked(self, dtype: str, transport: str) -> DeploymentConfig:
        """A pair whose pages go over `transport`, in parts while their contexts are computed."""
        config = self.config(dtype)
        return replace(
            config,
            central=replace(config.central, dispatch=DispatchPolicy.GENERATION_FIRST),
            scheduler=replace(config.scheduler, max_num_tokens=64),
            transfer=replace(config.transfer, transport=transport),
        )


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Place:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    shapes = SMOLLM2_SHAPES if request.param == "cuda" else SMOLLM2_SHAPES | {"num_layers": 3, "vocab_size": 1024}
    return Place(request.param, write_tiny_model(tmp_path_factory.mktemp("model") / "random", **shapes))


def _engine(place: Place, dtype: torch.dtype, *, num_slots: int = 160) -> Engine:
    config = load_model_config(place.folder)
    shape = (num_slots, config.num_layers, 2, config.num_kv_heads, 16, config.head_dim)
    pool = torch.zeros(shape, dtype=dtype, device=place.device)
    return Engine(config, load_weights(place.folder, config, dtype, place.device), {GROUP: pool})


def _tokens(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    drawn: list[int] = torch.randint(3, 259, (length,), generator=generator).tolist()
    return drawn


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_do_not_depend_on_chunks_nor_on_the_batch(place: Place, dtype: torch.dtype) -> None:
    engine = _engine(place, dtype)
    token_ids = _tokens(300, seed=0)
    whole = run_in_chunks(engine, HandFedSequence("whole", token_ids, range(19)), 300)
    assert torch.equal(run_in_chunks(engine, HandFedSequence("sevens", token_ids, range(20, 39)), 7)[-1], whole[-1])
    alone = HandFedSequence("alone", token_ids, range(40, 59))
    run_in_chunks(engine, HandFedSequence("alone", token_ids[:299], range(40, 59)), 256)
    neighbours = [HandFedSequence(f"n{n}", _tokens(40 + n, n), range(60 + 4 * n, 64 + 4 * n)) for n in range(15)]
    rows = [neighbour.rows(0, len(neighbour.token_ids)) for neighbour in neighbours[:8]]
    rows += [alone.rows(299, 300)]
    rows += [neighbour.rows(0, len(neighbour.token_ids)) for neighbour in neighbours[8:]]
    result = engine.step(StepBatch(rows), return_logits=True)
    assert result.logits is not None
    assert torch.equal(result.logits[8], whole[-1])


def _specs(choices: Sequence[SamplingParams]) -> list[RequestSpec]:
    prompts = [_tokens(length, seed=length) for length in (1, 16, 100, 257)]
    return [
        RequestSpec(
            uid=RequestUid(f"{len(prompt)}/{sampling.temperature}/{sampling.choice}"),
            door=DOOR,
            prompt_token_ids=tuple(prompt),
            sampling=sampling,
            stop=StopParams(max_tokens=12, ignore_eos=True),
        )
        for prompt in prompts
        for sampling in choices
    ]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_processes_that_hand_pages_over_give_the_tokens_of_one(place: Place, dtype: str, tmp_path: Path) -> None:
    sampled = [SamplingParams(temperature=0.8, seed=7, choice=choice) for choice in range(2)]
    specs = _specs([SamplingParams(temperature=0.0), *sampled])
    one_mixed = ClusterConfig(context_workers=0, generation_workers=0, mixed_workers=1)
    mixed = Deployment(place.config(dtype, one_mixed), place.folder, tmp_path)
    uids = [mixed.submit(s.prompt_token_ids, s.stop.max_tokens, sampling=s.sampling) for s in specs]
    expected = mixed.run(uids)
    mixed.settle_down()
    mixed.close()
    pair = PairOfProcesses(place.config(dtype), place.folder, tmp_path)
    assert pair.run(specs) == expected
    assert pair.transferred_bytes() > 0
    pair.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    "transport",
    [
        "collective",
        pytest.param("nixl", marks=pytest.mark.skipif(bool(nixl.why_unavailable()), reason=nixl.why_unavailable())),
    ],
)
def test_two_processes_on_a_network_transport_give_the_tokens_of_shared_memory(
    place: Place, transport: str, tmp_path: Path
) -> None:
    specs = _specs([SamplingParams(temperature=0.0)])
    near = PairOfProcesses(place.config("float32"), place.folder, tmp_path)
    expected = near.run(specs)
    num_bytes = near.transferred_bytes()
    near.close()
    far = PairOfProcesses(place.networked("float32", transport), place.folder, tmp_path)
    assert far.run(specs) == expected
    assert far.transferred_bytes() == num_bytes > 0
    far.close()
