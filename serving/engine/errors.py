"""What can be wrong with a model's files, and with getting them. User errors: a message, no stack trace.

ModelError
├── ModelFileError       a file or folder is missing, damaged, or of a kind that the engine cannot run
├── KernelsMissingError  the configuration asks for native kernels, and this machine or model has none
└── FetchError           a known model could not be downloaded
"""

from pathlib import Path


class ModelError(Exception):
    """No usable model; the text is meant for the user."""


class ModelFileError(ModelError):
    """A model file cannot be used; names the file and what is wrong with it."""

    def __init__(self, path: Path, problem: str) -> None:
        """Name the file and the problem."""
        super().__init__(f"{path}: {problem}")
        self.path = path
        self.problem = problem


class KernelsMissingError(ModelError):
    """Native kernels were asked for and cannot be had."""

    def __init__(self, head_dim: int, device: str) -> None:
        """Name what they would need."""
        super().__init__(
            "engine.kernels: native needs the library that is built at install where there is a C++ compiler, a CPU "
            f"with AVX2, device cpu (here {device}) and a head_dim that is a multiple of 8 (here {head_dim})"
        )


class FetchError(ModelError):
    """A known model could not be fetched."""
