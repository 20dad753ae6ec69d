"""Fixtures of this folder."""

from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from tests.fakes.served_cluster import Serve, ServedCluster, serve, small_config
from tests.fakes.tiny_model import write_tiny_model


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model with a byte tokenizer."""
    return write_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def served(model_folder: Path, tmp_path: Path) -> Serve:
    """Serve the tiny model, disaggregated unless told otherwise."""

    def start(*, mixed: bool = False) -> AbstractAsyncContextManager[ServedCluster]:
        folder = tmp_path / f"{mixed}"
        folder.mkdir(exist_ok=True)
        return serve(small_config(mixed=mixed), model_folder, folder)

    return start
