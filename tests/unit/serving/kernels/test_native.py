"""The native kernels, and the packed weights that they read."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from configs import KernelSet
from serving.engine.runner import Engine, exactness_class
from serving.engine.weights import PACKED_FOLDER, PackedWeights, load_weights
from serving.kernels.binding import Matrix, NativeLibrary, load_library
from serving.kernels.packing import pack_matrix
from tests.fakes.engine_rows import GROUP, HandFedSequence, run_in_chunks
from tests.fakes.tiny_model import TinyModel, make_tiny_model, tiny_config, write_tiny_model

_DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


@pytest.fixture(scope="module")
def library() -> NativeLibrary:
    found = load_library()
    if found is None:
        pytest.skip("the native library was not built: no C++ compiler, or a CPU without AVX2")
    return found


def _multiply(library: NativeLibrary, weight: torch.Tensor, rows: torch.Tensor, threads: int) -> torch.Tensor:
    panels = pack_matrix(weight, weight.dtype)
    out = torch.full((len(rows), len(weight)), float("nan"))
    matrix = Matrix(panels.data_ptr(), weight.shape[1], len(weight))
    is_bfloat16 = weight.dtype is torch.bfloat16
    library.multiply(
        matrix,
        is_bfloat16=is_bfloat16,
        rows=rows.data_ptr(),
        num_rows=len(rows),
        out=out.data_ptr(),
        threads=threads,
    )
    return out


@_DTYPES
def test_a_row_of_a_product_has_the_same_bits_in_any_number_of_rows_and_threads(
    library: NativeLibrary, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(75, 57, generator=generator).to(dtype)
    rows = torch.randn(70, 57, generator=generator)
    alone = torch.cat([_multiply(library, weight, row[None], threads=1) for row in rows])

    torch.testing.assert_close(alone, rows @ weight.float().T, rtol=1e-4, atol=1e-4)
    for num_rows in (*range(1, 32), 70):
        assert torch.equal(_multiply(library, weight, rows[:num_rows], threads=1), alone[:num_rows]), num_rows
        assert torch.equal(_multiply(library, weight, rows[-num_rows:].clone(), threads=2), alone[-num_rows:])


@_DTYPES
def test_logits_are_close_to_those_of_torch(library: NativeLibrary, dtype: torch.dtype) -> None:
    del library
    logits = {}
    for kernels in (KernelSet.NATIVE, KernelSet.TORCH):
        model = make_tiny_model(dtype, kernels=kernels, tie_embeddings=False)
        engine = Engine(model.config, model.weights, {GROUP: model.make_pool(20)}, exact=False)
        tokens = np.random.default_rng(0).integers(0, 300, 150).tolist()
        logits[kernels] = run_in_chunks(engine, HandFedSequence("a", tokens, range(10)), chunk=50)

    # Torch rounds rows to bfloat16 between products, the native kernels do not.
    tolerance = 1e-4 if dtype is torch.float32 else 0.4
    torch.testing.assert_close(logits[KernelSet.NATIVE], logits[KernelSet.TORCH], rtol=tolerance, atol=tolerance)


def test_the_second_load_maps_what_the_first_one_packed(library: NativeLibrary, tmp_path: Path) -> None:
    del library
    folder = write_tiny_model(tmp_path / "tiny")
    first = load_weights(folder, tiny_config(), torch.bfloat16, "cpu", KernelSet.NATIVE)
    (packed,) = (folder / PACKED_FOLDER).glob("*.packed")
    made = packed.stat()

    second = load_weights(folder, tiny_config(), torch.bfloat16, "cpu", KernelSet.NATIVE)

    assert isinstance(first, PackedWeights)
    assert isinstance(second, PackedWeights)
    assert packed.stat().st_mtime_ns == made.st_mtime_ns
    assert not second.memory.flags.writeable
    assert np.array_equal(first.memory, second.memory)


def test_a_packed_file_that_was_cut_short_is_made_again(library: NativeLibrary, tmp_path: Path) -> None:
    del library
    folder = write_tiny_model(tmp_path / "tiny")
    expected = _logits(folder)
    (packed,) = (folder / PACKED_FOLDER).glob("*.packed")
    size = packed.stat().st_size
    os.truncate(packed, size - 1)

    assert torch.equal(_logits(folder), expected)
    assert packed.stat().st_size == size


def _logits(folder: Path) -> torch.Tensor:
    weights = load_weights(folder, tiny_config(), torch.float32, "cpu", KernelSet.NATIVE)
    model = TinyModel(tiny_config(), weights)
    engine = Engine(model.config, weights, {GROUP: model.make_pool(4)})
    return run_in_chunks(engine, HandFedSequence("a", range(40), [0, 1, 2]), chunk=40)


def test_native_and_torch_kernels_are_of_unlike_exactness(library: NativeLibrary) -> None:
    native = exactness_class(KernelSet.NATIVE, tiny_config(), "cpu")

    assert native == library.exactness_class
    assert native != exactness_class(KernelSet.TORCH, tiny_config(), "cpu")


def test_a_head_that_is_no_whole_vector_is_left_to_torch() -> None:
    weights = make_tiny_model(head_dim=12).weights

    assert not isinstance(weights, PackedWeights)
