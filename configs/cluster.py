"""How many workers of each role, and what each asks of Ray."""

from dataclasses import dataclass

from configs.base import Section

_MIN_OBJECT_STORE_BYTES = 75 << 20  # Ray refuses less


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig(Section):
    """Worker counts and their resources.

    Attributes:
        ray_address: an existing cluster; empty starts a private one on this machine.
        gpus_per_worker: Ray GPUs that a worker asks for.
        object_store_bytes: of a private cluster; pages never pass through it, so it is small.
    """

    context_workers: int = 1
    generation_workers: int = 1
    mixed_workers: int = 0
    ray_address: str = ""
    gpus_per_worker: float = 0.0
    object_store_bytes: int = 80 << 20
    start_timeout_s: float = 120.0

    def __post_init__(self) -> None:
        """Refuse bad values and incomplete sets of roles."""
        self.require_not_negative("context_workers", "generation_workers", "mixed_workers", "gpus_per_worker")
        self.require_positive("start_timeout_s")
        if self.object_store_bytes < _MIN_OBJECT_STORE_BYTES:
            msg = f"object_store_bytes={self.object_store_bytes} is below Ray's least, {_MIN_OBJECT_STORE_BYTES}"
            raise ValueError(msg)
        if bool(self.context_workers) != bool(self.generation_workers):
            msg = (
                f"context_workers={self.context_workers} and generation_workers={self.generation_workers}: "
                "a disaggregated deployment needs at least one of each"
            )
            raise ValueError(msg)
        if not self.context_workers + self.mixed_workers:
            msg = "no worker at all: set context_workers and generation_workers, or mixed_workers"
            raise ValueError(msg)
        if self.context_workers and self.mixed_workers:
            msg = "mixed_workers cannot be combined with context_workers and generation_workers"
            raise ValueError(msg)

    @property
    def num_workers(self) -> int:
        """Workers of every role together."""
        return self.context_workers + self.generation_workers + self.mixed_workers
