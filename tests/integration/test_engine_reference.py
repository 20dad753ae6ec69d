"""The engine against transformers on the same weights, and E1 on the real model."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from manager import RequestId
from serving.engine.batch import SamplingKey, StepBatch
from serving.engine.fetch import DEFAULT_MODEL, default_cache_dir, fetched_folder
from serving.engine.runner import Engine
from serving.engine.weights import load_model_config, load_weights
from tests.fakes.engine_rows import GREEDY, GROUP, HandFedSequence, run_in_chunks
from tests.fakes.tiny_model import write_tiny_model

_NUM_GENERATED = 64
_PROMPTS = (
    "Write a short poem about the sea.",
    "What is the capital of France?",
    "def fibonacci(n):",
    "Explain, step by step, how a language model server hands a request over. " * 6,
)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model_folder() -> Path:
    folder = fetched_folder(DEFAULT_MODEL, default_cache_dir())
    if folder is None:
        pytest.skip("SmolLM2 is not fetched; run scripts/fetch_model.py")
    return folder


def _make_engine(folder: Path, dtype: torch.dtype, num_slots: int = 80) -> Engine:
    config = load_model_config(folder)
    shape = (num_slots, config.num_layers, 2, config.num_kv_heads, 16, config.head_dim)
    pool = torch.full(shape, float("nan"), dtype=dtype)
    return Engine(config, load_weights(folder, config, dtype, "cpu"), {GROUP: pool})


def _generate(engine: Engine, prompt: list[int], num_tokens: int, key: SamplingKey = GREEDY) -> list[int]:
    sequence = HandFedSequence("r", prompt, range(-(-(len(prompt) + num_tokens) // 16)))
    tokens: list[int] = []
    start = 0
    while len(tokens) < num_tokens:
        rows = sequence.rows(start, len(sequence.token_ids), replace(key, position=len(tokens)))
        tokens.append(engine.step(StepBatch([rows])).token_ids[RequestId("r")])
        start = len(sequence.token_ids)
        sequence.token_ids = np.append(sequence.token_ids, tokens[-1])
    return tokens


def _load_reference(folder: Path) -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def test_logits_of_a_random_model_are_those_of_transformers(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "tiny", tie_embeddings=False)
    token_ids = np.random.default_rng(0).integers(0, 300, 200).tolist()
    with torch.no_grad():
        expected = _load_reference(folder)(torch.tensor([token_ids])).logits[0]

    logits = run_in_chunks(_make_engine(folder, torch.float32), HandFedSequence("r", token_ids, range(13)), chunk=1)

    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.model
@pytest.mark.timeout(600)
def test_float32_greedy_tokens_are_those_of_transformers(model_folder: Path) -> None:
    tokenizers = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(model_folder)
    reference, engine = _load_reference(model_folder), _make_engine(model_folder, torch.float32)
    for text in _PROMPTS:
        messages = [{"role": "user", "content": text}]
        prompt = tokenizers.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
        inputs = torch.tensor([prompt])
        generated = reference.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            max_new_tokens=_NUM_GENERATED,
            do_sample=False,
            eos_token_id=[],
        )

        assert _generate(engine, prompt, _NUM_GENERATED) == generated[0, len(prompt) :].tolist(), text


@pytest.mark.model
@pytest.mark.timeout(600)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_real_models_logits_depend_neither_on_chunks_nor_on_batch_nor_on_threads(
    model_folder: Path, dtype: torch.dtype
) -> None:
    token_ids = np.random.default_rng(1).integers(0, 49152, 280).tolist()
    engine = _make_engine(model_folder, dtype, num_slots=160)
    whole = run_in_chunks(engine, HandFedSequence("whole", token_ids, range(18)), chunk=280)[0]
    in_sevens = HandFedSequence("sevens", token_ids, range(20, 38))
    decoded = HandFedSequence("decoded", token_ids, range(40, 58))
    engine.step(StepBatch([decoded.rows(0, 270, None), in_sevens.rows(0, 245, None)]))
    neighbours = [HandFedSequence(f"{n}", token_ids[n : n + 50 + n], range(60 + 5 * n, 65 + 5 * n)) for n in range(15)]

    one_by_one = run_in_chunks(engine, decoded, chunk=1, start=270)[-1]
    torch.set_num_threads(2)
    by_sevens = run_in_chunks(engine, in_sevens, chunk=7, start=245)[-1]
    rows = [neighbour.rows(0, len(neighbour.token_ids), None) for neighbour in neighbours]
    batched = engine.step(StepBatch([*rows[:7], decoded.rows(279, 280), *rows[7:]]), return_logits=True).logits
    torch.set_num_threads(1)

    assert torch.equal(by_sevens, whole)
    assert torch.equal(one_by_one, whole)
    assert batched is not None
    assert torch.equal(batched[0], whole)


@pytest.mark.model
@pytest.mark.timeout(600)
def test_a_seeded_bfloat16_stream_recomputed_at_any_point_continues_with_the_same_tokens(model_folder: Path) -> None:
    prompt = np.random.default_rng(2).integers(0, 49152, 30).tolist()
    key = SamplingKey(temperature=0.9, top_k=0, top_p=0.95, min_p=0.0, seed=77, choice=1, position=0)
    engine = _make_engine(model_folder, torch.bfloat16)
    tokens = _generate(engine, prompt, 16, key)

    for accepted in (1, 9, 15):
        sequence = HandFedSequence("again", prompt + tokens[:accepted], range(20, 24))
        rows = sequence.rows(0, len(sequence.token_ids), replace(key, position=accepted))
        assert engine.step(StepBatch([rows])).token_ids[RequestId("again")] == tokens[accepted]
