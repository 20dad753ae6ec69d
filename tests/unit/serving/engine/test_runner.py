import subprocess
import sys

import numpy as np
import pytest
import torch

from manager import LayerGroupId, LayerId, RequestId
from serving.engine.batch import SequenceRows, StepBatch
from serving.engine.runner import Engine
from serving.engine.sampler import NonFiniteLogitsError
from tests.fakes.engine_rows import GREEDY, GROUP, HandFedSequence, run_in_chunks
from tests.fakes.tiny_model import TinyModel, make_tiny_model


@pytest.fixture(scope="module")
def model() -> TinyModel:
    return make_tiny_model(max_position=128)


def _make_engine(model: TinyModel, pool: torch.Tensor | None = None, *, exact: bool = False) -> Engine:
    """Not exact unless said so: these tests look at one batch at a time, and measuring takes a moment."""
    return Engine(model.config, model.weights, {GROUP: model.make_pool(32) if pool is None else pool}, exact=exact)


def _sequence(num_tokens: int = 40) -> HandFedSequence:
    return HandFedSequence("r1", np.random.default_rng(3).integers(0, 300, num_tokens).tolist(), [5, 2, 9])


def test_only_sequences_that_sample_get_a_token(model: TinyModel) -> None:
    engine = _make_engine(model)
    drawing, silent = _sequence(), HandFedSequence("r2", [1, 2, 3], [20])

    result = engine.step(StepBatch([silent.rows(0, 3, None), drawing.rows(0, 40)]), return_logits=True)

    assert list(result.token_ids) == ["r1"]
    assert result.logits is not None
    assert result.logits.shape == (1, 300)
    assert result.token_ids[RequestId("r1")] == int(result.logits[0].argmax())


def test_a_step_in_which_nobody_samples_draws_nothing_but_writes_its_pages(model: TinyModel) -> None:
    pool = model.make_pool(32)
    engine = _make_engine(model, pool)

    result = engine.step(StepBatch([_sequence().rows(0, 40, None)]))

    assert result.token_ids == {}
    assert result.logits is None
    assert bool(pool[[5, 2]].isfinite().all())


def test_a_step_touches_no_page_but_those_of_its_rows(model: TinyModel) -> None:
    pool = model.make_pool(32, fill=7.0)
    engine = _make_engine(model, pool)
    engine.step(StepBatch([_sequence().rows(0, 20)]))
    before = pool.clone()

    engine.step(StepBatch([_sequence().rows(20, 40)]))

    changed = [slot for slot in range(32) if not torch.equal(pool[slot], before[slot])]
    assert changed == [2, 9]
    assert torch.equal(pool[2][..., :4, :], before[2][..., :4, :])
    assert torch.equal(pool[9][..., 8:, :], before[9][..., 8:, :])


def test_a_retried_step_draws_the_same_token_and_leaves_the_same_pages(model: TinyModel) -> None:
    pool = model.make_pool(32, fill=0.0)
    engine = _make_engine(model, pool)
    batch = StepBatch([_sequence().rows(0, 40)])
    first = engine.step(batch)
    pages = pool.clone()

    second = engine.step(batch)

    assert second.token_ids == first.token_ids
    assert torch.equal(pool, pages)


def test_layers_split_over_two_pools_give_the_bits_of_one_pool(model: TinyModel) -> None:
    together = run_in_chunks(_make_engine(model, exact=True), _sequence(), chunk=17)
    groups = {LayerGroupId(0): [LayerId(1)], LayerGroupId(1): [LayerId(0)]}
    pools = {group: model.make_pool(32)[:, :1].contiguous() for group in groups}
    engine = Engine(model.config, model.weights, pools, layer_groups=groups)
    tables = {LayerGroupId(0): np.array([5, 2, 9], np.int32), LayerGroupId(1): np.array([1, 30, 4], np.int32)}
    tokens = _sequence().token_ids

    for start, end in ((0, 17), (17, 34), (34, 40)):
        rows = SequenceRows(RequestId("r1"), tokens[start:end], start, tables, GREEDY)
        result = engine.step(StepBatch([rows]), return_logits=True)

    assert result.logits is not None
    assert torch.equal(result.logits[0], together[-1])


def test_a_position_without_a_page_is_refused_before_anything_is_written(model: TinyModel) -> None:
    pool = model.make_pool(32, fill=0.0)
    engine = _make_engine(model, pool)
    good, short = _sequence(), HandFedSequence("short", [1] * 33, [10, 11])

    with pytest.raises(ValueError, match="short: positions up to 33 need 3 blocks, the table has 2"):
        engine.step(StepBatch([good.rows(0, 40), short.rows(0, 33)]))

    assert not pool.any()


@pytest.mark.parametrize("slot", [-1, 32])
def test_a_slot_outside_the_pool_is_refused(model: TinyModel, slot: int) -> None:
    sequence = HandFedSequence("r1", [1] * 33, [3, slot, 4])

    with pytest.raises(ValueError, match=r"r1: a slot of layer group 0 is outside \[0, 32\)"):
        _make_engine(model).step(StepBatch([sequence.rows(0, 33)]))


def test_a_position_past_the_models_context_is_refused(model: TinyModel) -> None:
    sequence = HandFedSequence("r1", [1] * 129, range(9))

    with pytest.raises(ValueError, match="r1: position 128 is past the context of 128"):
        _make_engine(model).step(StepBatch([sequence.rows(100, 129)]))


def test_a_step_or_a_sequence_without_rows_is_refused(model: TinyModel) -> None:
    engine = _make_engine(model)

    with pytest.raises(ValueError, match="at least one row"):
        engine.step(StepBatch([]))
    with pytest.raises(ValueError, match="r1: no rows"):
        engine.step(StepBatch([_sequence().rows(3, 3)]))


def test_damaged_pages_end_in_an_error_and_not_in_a_token(model: TinyModel) -> None:
    pool = model.make_pool(32)
    engine = _make_engine(model, pool)
    engine.step(StepBatch([_sequence().rows(0, 39)]))
    pool[5].fill_(float("nan"))

    with pytest.raises(NonFiniteLogitsError, match=r"rows \[0\] of 1"):
        engine.step(StepBatch([_sequence().rows(39, 40)]))


def test_pools_that_do_not_fit_the_model_are_refused(model: TinyModel) -> None:
    pool = model.make_pool(8)
    with pytest.raises(ValueError, match="bfloat16"):
        _make_engine(model, pool.bfloat16())
    with pytest.raises(ValueError, match="1 layers, the group 2"):
        _make_engine(model, pool[:, :1].contiguous())
    with pytest.raises(ValueError, match="layer_groups must say"):
        Engine(model.config, model.weights, {GROUP: pool, LayerGroupId(1): pool})
    with pytest.raises(ValueError, match=r"hold layers \[0\], the model has 2"):
        Engine(model.config, model.weights, {GROUP: pool}, layer_groups={GROUP: [LayerId(0)]})


def test_the_engine_runs_where_only_torch_numpy_and_safetensors_are_installed() -> None:
    absent = ["gguf", "tokenizers", "transformers", "tqdm", "ray", "fastapi", "pydantic", "yaml"]
    program = (
        "import sys\n"
        f"sys.modules.update(dict.fromkeys({absent}))\n"  # None there makes an import fail
        "import serving.engine.runner, serving.engine.weights"
    )

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=120)

    assert done.returncode == 0, done.stderr
