"""Fixtures of these folders."""

from pathlib import Path

import pytest

from tests.fakes.tiny_tokenizer import make_tokenizer_folder


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer folder."""
    return make_tokenizer_folder(tmp_path_factory.mktemp("tiny"))
