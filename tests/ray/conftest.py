"""Servers shared by the tests of one file."""

from collections.abc import Iterator

import pytest

from tests.ray.server_process import ServerProcess, running_server


@pytest.fixture(scope="package")
def disaggregated() -> Iterator[ServerProcess]:
    """One context and one generation worker, float32, between which every prompt is handed over."""
    with running_server("--config", "local-cpu", "--dtype", "float32", "--local-prefill", "0") as server:
        yield server
