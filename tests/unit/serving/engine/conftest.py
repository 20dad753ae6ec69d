"""Thread counts are torch's global state: tests set them through fixtures that put them back."""

from collections.abc import Callable, Iterator

import pytest
import torch

from configs import KernelSet
from serving.kernels.binding import load_library


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def set_threads() -> Iterator[Callable[[int], None]]:
    """Set torch's thread count for one test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=list(KernelSet)[1:], ids=str)
def kernels(request: pytest.FixtureRequest) -> KernelSet:
    """Each set of kernels that can run here."""
    if request.param is KernelSet.NATIVE and load_library() is None:
        pytest.skip("the native library was not built: no C++ compiler, or a CPU without AVX2")
    return KernelSet(request.param)
