"""How many workers of each role, and what each asks of Ray."""

from pydantic import Field, model_validator

from configs.base import FrozenModel


class ClusterConfig(FrozenModel):
    """Worker counts and their resources."""

    context_workers: int = Field(1, ge=0)
    generation_workers: int = Field(1, ge=0)
    mixed_workers: int = Field(0, ge=0)
    ray_address: str = Field("", description="An existing cluster; empty starts a private one on this machine.")
    cpus_per_worker: float = Field(0.0, ge=0, description="Ray CPUs asked for by a worker.")
    gpus_per_worker: float = Field(0.0, ge=0)
    object_store_bytes: int = Field(80 << 20, ge=75 << 20)
    start_timeout_s: float = Field(120.0, gt=0)

    @model_validator(mode="after")
    def _roles_complete(self) -> "ClusterConfig":
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
        return self

    @property
    def num_workers(self) -> int:
        """Workers of every role together."""
        return self.context_workers + self.generation_workers + self.mixed_workers
