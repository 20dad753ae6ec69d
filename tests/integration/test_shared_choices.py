"""n choices of one prompt: one prefill, one transfer, n streams that are bit for bit those of n requests (C4)."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from configs import DeploymentConfig, load_deployment
from manager import WorkerName
from scheduler.spec import FinishReason, SamplingParams, StopParams
from serving.engine.batch import StepBatch, StepResult
from serving.engine.runner import Engine
from tests.fakes.deployments import DOOR, Deployment
from tests.fakes.tiny_model import write_tiny_model

PROMPTS = {"within a block": list(range(3, 40)), "whole blocks": list(range(3, 35)), "short": [5] * 3}
GREEDY, SEEDED = (
    SamplingParams(temperature=0.0, num_logprobs=2),
    SamplingParams(temperature=5.0, seed=77, num_logprobs=1),
)
Make = Callable[..., Deployment]


def config(*, mixed: bool, share: bool, dtype: str = "float32", **sections: dict[str, object]) -> DeploymentConfig:
    small = {"tiers": [{"tier": "device", "quota_bytes": 4 << 20}], "max_sequences": 16}
    overrides: dict[str, dict[str, object]] = {
        "engine": {"dtype": dtype},
        "cache": small,
        "scheduler": {"max_batch_size": 16},
        "central": {"share_choices": share},
        "router": {"local_prefill_max_tokens": 0},
    }
    for name, values in sections.items():
        overrides[name] = {**overrides.get(name, {}), **values}
    return load_deployment("local-mixed" if mixed else "local-cpu", overrides)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def make(model_folder: Path, tmp_path: Path) -> Iterator[Make]:
    with ExitStack() as stack:

        def build(**options: object) -> Deployment:
            folder = tmp_path / f"pools-{len(list(tmp_path.iterdir()))}"
            folder.mkdir()
            deployment = Deployment(config(**options), model_folder, folder)  # type: ignore[arg-type]
            stack.callback(deployment.close)
            stack.callback(deployment.settle_down)
            return deployment

        yield build


def rows_of_prompts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Notes how many prompt positions every step computes from now on."""
    computed: list[int] = []
    real = Engine.step

    def step(self: Engine, batch: StepBatch, *, return_logits: bool = False) -> StepResult:
        computed.extend(len(sequence.token_ids) for sequence in batch.sequences if len(sequence.token_ids) > 1)
        return real(self, batch, return_logits=return_logits)

    monkeypatch.setattr(Engine, "step", step)
    return computed


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("mixed", [True, False], ids=["mixed", "disaggregated"])
def test_shared_choices_have_the_tokens_of_single_requests(
    make: Make, sampling: SamplingParams, dtype: str, mixed: bool
) -> None:
    shared, single = make(mixed=mixed, share=True, dtype=dtype), make(mixed=True, share=False, dtype=dtype)
    for prompt in PROMPTS.values():
        together = shared.run(shared.submit_choices(prompt, 4, 12, sampling))
        alone = [single.run([uid])[0] for uid in single.submit_choices(prompt, 4, 12, sampling)]
        assert together == alone
        assert (len(set(map(tuple, together))) == 1) == (sampling is GREEDY)
    assert shared.central_counts()["shared_contexts"] == 3 * len(PROMPTS)
    assert shared.counts("forks") == 3 * len(PROMPTS)
    assert single.counts("forks") == 0


def test_four_choices_take_one_prefill_and_one_transfer(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    deployment, prompt = make(mixed=False, share=True), PROMPTS["within a block"]
    computed = rows_of_prompts(monkeypatch)
    deployment.run(deployment.submit_choices(prompt, 4, 8, SEEDED))
    assert computed == [len(prompt)]
    assert deployment.counts("transfers") == 1
    assert deployment.counts("shared_prefills") == 3
    assert deployment.counts("forks") == 3
    assert deployment.central_counts()["divergences"] == 0
    deployment.settle_down()


def test_a_mixed_worker_computes_the_prompt_once(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    deployment, prompt = make(mixed=True, share=True), PROMPTS["within a block"]
    computed = rows_of_prompts(monkeypatch)
    deployment.run(deployment.submit_choices(prompt, 4, 8, SEEDED))
    assert computed == [len(prompt)]
    assert deployment.counts("forks") == 3


def test_choices_finished_by_their_first_token_take_no_part_in_the_transfer(make: Make) -> None:
    deployment = make(mixed=False, share=True)
    firsts = deployment.run(deployment.submit_choices(PROMPTS["short"], 4, 1, SEEDED))
    assert deployment.counts("transfers") == 0
    ending = firsts[0][0]
    stop = StopParams(max_tokens=6, ignore_eos=True, stop_token_ids=(ending,))
    uids = deployment.submit_choices(PROMPTS["short"], 4, 6, SEEDED, stop=stop)
    tokens = deployment.run(uids)
    assert tokens[0] == [ending]
    assert deployment.finished[uids[0]] is FinishReason.STOP
    assert any(len(stream) > 1 for stream in tokens), "the seed lets some choice go on"
    assert deployment.counts("transfers") == 1


@pytest.mark.parametrize("place", [0, 1, 3])
@pytest.mark.parametrize("turns", [0, 1, 2, 3, 4, 6])
def test_a_choice_that_is_cancelled_leaves_the_others_alone(make: Make, place: int, turns: int) -> None:
    deployment, reference = make(mixed=False, share=True), make(mixed=True, share=False)
    prompt = PROMPTS["within a block"]
    expected = reference.run(reference.submit_choices(prompt, 4, 8, SEEDED))
    uids = deployment.submit_choices(prompt, 4, 8, SEEDED)
    for _ in range(turns):
        deployment.pump()
    deployment.cluster.cancel(DOOR, [uids[place]])
    for _ in range(3000):
        deployment.pump()
        lost = {notice.uid for notice in deployment.notices}
        if all(uid in deployment.finished or uid in lost for uid in uids if uid != uids[place]):
            break
    # A follower whose leader went while it carried the pages is handed back to its door, which goes on alone.
    assert lost <= set(uids) - {uids[place]}
    assert place == 0 or not lost
    for uid, tokens in zip(uids, expected, strict=True):
        assert tokens[: len(deployment.tokens_of(uid))] == deployment.tokens_of(uid)
        assert uid in lost or uid == uids[place] or deployment.tokens_of(uid) == tokens
    deployment.settle_down()
    assert deployment.central_counts()["divergences"] == 0


@pytest.mark.parametrize("turns", range(0, 9))
def test_a_client_that_leaves_takes_all_choices_with_it(make: Make, turns: int) -> None:
    deployment = make(mixed=False, share=True)
    uids = deployment.submit_choices(PROMPTS["within a block"], 4, 50, SEEDED)
    for _ in range(turns):
        deployment.pump()
    deployment.cluster.cancel(DOOR, uids)
    deployment.settle_down()
    assert deployment.notices == []
    assert deployment.central_counts()["cancelled"] == 4


def test_more_choices_than_the_pools_hold_at_once_all_come_to_their_end(make: Make) -> None:
    tight = {"tiers": [{"tier": "device", "quota_bytes": 1 << 20}], "max_sequences": 4}
    deployment = make(mixed=False, share=True, cache=tight, scheduler={"max_batch_size": 4})
    reference = make(mixed=True, share=False)
    prompt = PROMPTS["within a block"]
    expected = reference.run(reference.submit_choices(prompt, 12, 10, SEEDED))
    assert deployment.run(deployment.submit_choices(prompt, 12, 10, SEEDED)) == expected
    assert deployment.counts("transfers") == 1


def test_the_followers_of_a_lost_generation_worker_are_handed_to_their_doors(make: Make) -> None:
    deployment = make(mixed=False, share=True)
    uids = deployment.submit_choices(PROMPTS["within a block"], 3, 40, SEEDED)
    while not all(deployment.tokens_of(uid) for uid in uids):
        deployment.pump()
    lost = next(name for name, worker in deployment.cluster.workers.items() if "generation" in name)
    deployment.cluster.central.worker_lost(WorkerName(lost), "ended by the test", 0.0)
    deployment.cluster.deliver()
    deployment.notices += deployment.cluster.take_notices()
    assert {notice.uid for notice in deployment.notices} == set(uids)
    assert all(notice.retriable for notice in deployment.notices)
