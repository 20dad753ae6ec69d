"""E1: a row's logits are the same bits whatever else is computed with it."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

from configs import KernelSet
from serving.engine import torch_forward
from serving.engine.attention import ProductRule
from serving.engine.batch import StepBatch
from serving.engine.linear import RowRule
from serving.engine.plan import BatchRules
from serving.engine.runner import Engine
from tests.fakes.engine_rows import GROUP, HandFedSequence, run_in_chunks
from tests.fakes.tiny_model import TinyModel, make_tiny_model

_NUM_TOKENS = 290
_NUM_SLOTS = 256


@pytest.fixture(
    scope="module",
    params=[(torch.float32, ()), (torch.bfloat16, ()), (torch.float32, (70, 70)), (torch.bfloat16, (70, 70))],
    ids=["float32", "bfloat16", "float32-windowed", "bfloat16-windowed"],
)
def model(request: pytest.FixtureRequest, kernels: KernelSet) -> TinyModel:
    dtype, windows = request.param
    # An intermediate size that is no multiple of a vector, so that scalar tails are computed too.
    return make_tiny_model(
        dtype,
        kernels=kernels,
        intermediate_size=157,
        num_heads=6,
        hidden_size=72,
        layer_windows=windows,
        num_sink_tokens=3 if windows else 0,
    )


def _make_engine(model: TinyModel) -> Engine:
    return Engine(model.config, model.weights, {GROUP: model.make_pool(_NUM_SLOTS)})


def _sequence(name: str, seed: int, first_slot: int = 0, num_tokens: int = _NUM_TOKENS) -> HandFedSequence:
    random = np.random.default_rng(seed)
    num_blocks = -(-num_tokens // 16)
    slots = first_slot + random.permutation(num_blocks)
    return HandFedSequence(name, random.integers(0, 300, num_tokens).tolist(), slots.tolist())


@pytest.fixture(scope="module")
def alone(model: TinyModel) -> torch.Tensor:
    """Logits of every position, computed one by one with one thread: [num_tokens, vocab_size]."""
    return run_in_chunks(_make_engine(model), _sequence("alone", seed=1), chunk=1)


@pytest.mark.parametrize(
    ("chunk", "num_threads"), [(7, 1), (64, 1), (100, 1), (256, 1), (_NUM_TOKENS, 1), (100, 2), (_NUM_TOKENS, 2)]
)
def test_a_chunk_of_any_size_gives_the_logits_of_decoding_alone(
    model: TinyModel, alone: torch.Tensor, set_threads: Callable[[int], None], chunk: int, num_threads: int
) -> None:
    set_threads(num_threads)

    logits = run_in_chunks(_make_engine(model), _sequence("alone", seed=1), chunk)

    ends = [min(first + chunk, _NUM_TOKENS) - 1 for first in range(0, _NUM_TOKENS, chunk)]
    assert torch.equal(logits, alone[ends])


def _mixed_batch(engine: Engine, others: Sequence[HandFedSequence], target: HandFedSequence, place: int) -> StepBatch:
    """Decode rows of `others` at different depths, a chunk, and the last row of `target` at `place`."""
    rows = []
    for n, other in enumerate(others):
        depth = 5 + 13 * n
        engine.step(StepBatch([other.rows(0, depth, None)]))
        chunk = 33 if n == 3 else 1
        rows.append(other.rows(depth, depth + chunk))
    rows.insert(place, target.rows(_NUM_TOKENS - 1, _NUM_TOKENS))
    return StepBatch(rows)


@pytest.mark.parametrize(("place", "num_threads"), [(0, 1), (7, 2), (15, 1)])
def test_a_batch_of_sixteen_with_a_chunk_in_it_gives_the_logits_of_decoding_alone(
    model: TinyModel, alone: torch.Tensor, set_threads: Callable[[int], None], place: int, num_threads: int
) -> None:
    set_threads(num_threads)
    engine = _make_engine(model)
    target = _sequence("target", seed=1)
    engine.step(StepBatch([target.rows(0, _NUM_TOKENS - 1, None)]))
    others = [_sequence(f"other {n}", seed=2 + n, first_slot=20 + 15 * n, num_tokens=230) for n in range(15)]

    result = engine.step(_mixed_batch(engine, others, target, place), return_logits=True)

    assert result.logits is not None
    assert len(result.logits) == 16
    assert torch.equal(result.logits[place], alone[-1])


@pytest.mark.parametrize("num_sinks", [0, 3])
@pytest.mark.parametrize("chunk", [7, 64, 460])
def test_tiles_that_a_window_leaves_out_change_no_bit(kernels: KernelSet, chunk: int, num_sinks: int) -> None:
    small = make_tiny_model(kernels=kernels, layer_windows=(70, 70), num_sink_tokens=num_sinks)
    one_by_one = run_in_chunks(_make_engine(small), _sequence("alone", seed=1, num_tokens=460), chunk=1)

    logits = run_in_chunks(_make_engine(small), _sequence("alone", seed=1, num_tokens=460), chunk)

    ends = [min(first + chunk, 460) - 1 for first in range(0, 460, chunk)]
    assert torch.equal(logits, one_by_one[ends])


def test_the_size_of_blocks_changes_no_bit(model: TinyModel, alone: torch.Tensor) -> None:
    for tokens_per_block in (8, 24, 128, 256):
        engine = Engine(model.config, model.weights, {GROUP: model.make_pool(40, tokens_per_block)})
        tokens = _sequence("alone", seed=1).token_ids.tolist()
        sequence = HandFedSequence("alone", tokens, range(-(-_NUM_TOKENS // tokens_per_block)))

        logits = run_in_chunks(engine, sequence, chunk=97)

        assert torch.equal(logits[-1], alone[-1]), tokens_per_block


def test_a_prefix_computed_for_another_sequence_gives_the_same_logits(model: TinyModel, alone: torch.Tensor) -> None:
    engine = _make_engine(model)
    first = _sequence("first", seed=1)
    engine.step(StepBatch([first.rows(0, 160, None)]))
    shared = HandFedSequence("second", first.token_ids.tolist(), [*first.block_table[:10], *range(100, 109)])

    logits = run_in_chunks(engine, shared, chunk=130, start=160)

    assert torch.equal(logits[-1], alone[-1])


def test_many_steps_of_a_wide_batch_equal_their_requests_alone(model: TinyModel) -> None:
    num_sequences, num_tokens = 12, 40
    sequences = [_sequence(f"{n}", seed=50 + n, first_slot=3 * n, num_tokens=num_tokens) for n in range(num_sequences)]
    together, apart = _make_engine(model), _make_engine(model)
    wide: list[torch.Tensor] = []
    for position in range(num_tokens):
        result = together.step(StepBatch([s.rows(position, position + 1) for s in sequences]), return_logits=True)
        assert result.logits is not None
        wide.append(result.logits)

    for n, sequence in enumerate(sequences):
        expected = run_in_chunks(apart, sequence, chunk=1)
        assert torch.equal(torch.stack([logits[n] for logits in wide]), expected)


def test_calls_of_one_fixed_size_are_exact_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a machine gets whose torch kernels agree at no multiple of rows."""
    model = make_tiny_model(kernels=KernelSet.TORCH, intermediate_size=157, num_heads=6, hidden_size=72)
    rules = BatchRules(RowRule(128, 128), RowRule(32, 32), ProductRule(row_multiple=192, products_per_call=64))
    monkeypatch.setattr(torch_forward, "measured_rules", lambda *_: rules)
    sequence = _sequence("alone", seed=1, num_tokens=140)
    one_by_one = run_in_chunks(_make_engine(model), sequence, chunk=1)

    logits = run_in_chunks(_make_engine(model), sequence, chunk=140)

    assert torch.equal(logits[-1], one_by_one[-1])
