"""The real model under pools so small that requests are suspended, recomputed and resumed: transformers' tokens."""

from collections import Counter
from pathlib import Path

import pytest

from configs import load_deployment
from serving.engine.fetch import DEFAULT_MODEL, default_cache_dir, fetched_folder
from serving.tokenizer import Tokenizer
from tests.fakes.deployments import Deployment
from tests.fakes.reference import agrees_with_reference, transformers_greedy

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]

_PAGE_BYTES = 30 * 2 * 3 * 16 * 64 * 4  # layers, K and V, KV heads, tokens, head_dim, float32
_NUM_TOKENS = 40
_TEXTS = (
    "The capital of France is",
    "Once upon a time, in a small village by the sea, there lived",
    "def fibonacci(n):",
    "Water boils at one hundred degrees because",
    "The three most important inventions of the last century are",
)


@pytest.fixture(scope="module")
def model_folder() -> Path:
    folder = fetched_folder(DEFAULT_MODEL, default_cache_dir())
    if folder is None:
        pytest.skip("SmolLM2 is not fetched; run scripts/fetch_model.py")
    return folder


def test_under_pools_that_hold_a_third_of_what_runs_the_tokens_are_those_of_transformers(
    model_folder: Path, tmp_path: Path
) -> None:
    # Fifteen to twenty blocks are wanted: six have a place on the device, two in each lower tier.
    tiers = [("device", 6), ("host", 2), ("disk", 2)]
    overrides: dict[str, dict[str, object]] = {
        "engine": {"dtype": "float32"},
        "cache": {
            "tiers": [{"tier": tier, "quota_bytes": pages * _PAGE_BYTES} for tier, pages in tiers],
            "max_sequences": 5,
        },
        "scheduler": {"max_batch_size": 5, "max_num_tokens": 64, "chunk_unit_tokens": 16},
    }
    deployment = Deployment(load_deployment("local-mixed", overrides), model_folder, tmp_path)
    tokenizer = Tokenizer.load(model_folder)
    prompts = [tokenizer.encode(text) for text in _TEXTS]

    answers = deployment.generate(prompts, _NUM_TOKENS)

    for tokens, prompt in zip(answers, prompts, strict=True):
        agrees_with_reference(tokens, transformers_greedy(model_folder, prompt, _NUM_TOKENS))
    counts: Counter[str] = Counter()
    for worker in deployment.cluster.workers.values():
        counts.update(worker.snapshot().counters)
    seen = {name: counts[name] for name in ("suspensions", "resumes", "recomputes")}
    assert min(seen.values()) >= 2, seen
    deployment.settle_down()
    deployment.close()
