"""I15 on the real model: mixed == disaggregated == any batch, and == transformers in float32 greedy."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from configs import DeploymentConfig, load_deployment
from scheduler.spec import SamplingParams
from serving.engine.fetch import DEFAULT_MODEL, default_cache_dir, fetched_folder
from serving.tokenizer import Tokenizer
from tests.fakes.deployments import Deployment
from tests.fakes.reference import ReferenceStep, agrees_with_reference, transformers_greedy

pytestmark = [pytest.mark.model, pytest.mark.timeout(900)]

NUM_TOKENS = 64
_TEXT = (
    "The lighthouse keeper climbed the narrow stairs every evening, counting the steps aloud, and every evening "
    "the number was the same. He wrote it in a book, together with the colour of the sea and the names of the ships. "
)


def _config(dtype: str, *, mixed: bool) -> DeploymentConfig:
    # One thread drives everything here and cannot renew a lease during a step, which may take seconds.
    overrides: dict[str, dict[str, object]] = {
        "engine": {"dtype": dtype},
        "transfer": {"lease_duration_s": 600.0},
        "router": {"local_prefill_max_tokens": 0},  # what is tested is the handoff
    }
    return load_deployment("local-mixed" if mixed else "local-cpu", overrides)


@pytest.fixture(scope="module")
def model_folder() -> Path:
    folder = fetched_folder(DEFAULT_MODEL, default_cache_dir())
    if folder is None:
        pytest.skip("SmolLM2 is not fetched; run scripts/fetch_model.py")
    return folder


@pytest.fixture(scope="module")
def prompts(model_folder: Path) -> list[list[int]]:
    """1 to 1,500 tokens; two share a long prefix; two are exact multiples of a page."""
    text = Tokenizer.load(model_folder).encode(_TEXT * 40)
    return [
        text[5:6],
        text[:13],
        text[:32],
        text[100:148],
        text[40:240] + text[300:311],
        text[40:240] + text[500:523],
        text[200:777],
        text[:1500],
    ]


@pytest.fixture(scope="module")
def reference(model_folder: Path, prompts: list[list[int]]) -> list[list[ReferenceStep]]:
    return [transformers_greedy(model_folder, prompt, NUM_TOKENS) for prompt in prompts]


@pytest.fixture(scope="module", params=["mixed", "disaggregated"])
def float32(
    request: pytest.FixtureRequest, model_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployment]:
    deployment = Deployment(
        _config("float32", mixed=request.param == "mixed"), model_folder, tmp_path_factory.mktemp("pools")
    )
    yield deployment
    deployment.close()


def test_one_by_one_the_tokens_are_those_of_transformers(
    float32: Deployment, prompts: list[list[int]], reference: list[list[ReferenceStep]]
) -> None:
    for prompt, steps in zip(prompts, reference, strict=True):
        (tokens,) = float32.generate([prompt], NUM_TOKENS)
        agrees_with_reference(tokens, steps)
    float32.settle_down()


def test_all_at_once_the_tokens_are_those_of_transformers(
    float32: Deployment, prompts: list[list[int]], reference: list[list[ReferenceStep]]
) -> None:
    for tokens, steps in zip(float32.generate(prompts, NUM_TOKENS), reference, strict=True):
        agrees_with_reference(tokens, steps)
    float32.settle_down()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_sampled_choices_are_the_same_mixed_alone_and_disaggregated_together_and_differ(
    dtype: str, model_folder: Path, tmp_path: Path
) -> None:
    samplings = [SamplingParams(temperature=0.8, seed=1234, choice=choice) for choice in range(3)]
    tokenizer = Tokenizer.load(model_folder)
    # Open-ended, so that the choices have room to differ.
    chosen = [tokenizer.encode(text) for text in ("Once upon a time", "My favourite place is", _TEXT + "One day")]
    requests = [(prompt, sampling) for prompt in chosen for sampling in samplings]
    alone = _run(_config(dtype, mixed=True), model_folder, tmp_path / "alone", requests, 24, one_by_one=True)
    together = _run(_config(dtype, mixed=False), model_folder, tmp_path / "together", requests, 24, one_by_one=False)
    assert alone == together
    for index in range(0, len(alone), 3):
        assert len({tuple(tokens) for tokens in alone[index : index + 3]}) == 3


def test_bfloat16_greedy_is_the_same_mixed_alone_and_disaggregated_together(
    model_folder: Path, prompts: list[list[int]], tmp_path: Path
) -> None:
    requests = [(prompt, SamplingParams(temperature=0.0)) for prompt in prompts]
    alone = _run(
        _config("bfloat16", mixed=True), model_folder, tmp_path / "alone", requests, NUM_TOKENS, one_by_one=True
    )
    together = _run(
        _config("bfloat16", mixed=False), model_folder, tmp_path / "together", requests, NUM_TOKENS, one_by_one=False
    )
    assert alone == together


def _run(
    config: DeploymentConfig,
    model_folder: Path,
    pools: Path,
    requests: list[tuple[list[int], SamplingParams]],
    num_tokens: int,
    *,
    one_by_one: bool,
) -> list[list[int]]:
    pools.mkdir()
    deployment = Deployment(config, model_folder, pools)
    if one_by_one:
        tokens = [
            deployment.run([deployment.submit(prompt, num_tokens, sampling=sampling)])[0]
            for prompt, sampling in requests
        ]
    else:
        tokens = deployment.run(
            [deployment.submit(prompt, num_tokens, sampling=sampling) for prompt, sampling in requests]
        )
    deployment.settle_down()
    deployment.close()
    return tokens
