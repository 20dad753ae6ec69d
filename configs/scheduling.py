"""Budgets and policies of the iteration scheduler (one per worker) and of the central scheduler."""

from enum import StrEnum

from pydantic import Field, model_validator

from configs.base import FrozenModel


class SchedulingPolicy(StrEnum):
    """What a worker promises to a request that it admits."""

    MAX_UTILIZATION = "max_utilization"
    GUARANTEED_NO_EVICT = "guaranteed_no_evict"


class ChunkingPolicy(StrEnum):
    """How the token budget is shared among contexts."""

    FIRST_COME_FIRST_SERVED = "first_come_first_served"
    EQUAL_PROGRESS = "equal_progress"


class SchedulerConfig(FrozenModel):
    """Budgets of one iteration."""

    max_num_tokens: int = Field(512, gt=0, description="Rows of one step: context tokens plus decode tokens.")
    max_batch_size: int = Field(64, gt=0, description="Requests in one step.")
    chunk_unit_tokens: int = Field(64, gt=0, description="A context chunk that is not the last is a multiple of this.")
    policy: SchedulingPolicy = SchedulingPolicy.MAX_UTILIZATION
    chunking: ChunkingPolicy = ChunkingPolicy.FIRST_COME_FIRST_SERVED
    max_step_retries: int = Field(1, ge=0, description="Failed steps after which the step's requests fail.")

    @model_validator(mode="after")
    def _chunk_fits(self) -> "SchedulerConfig":
        if self.chunk_unit_tokens > self.max_num_tokens:
            msg = f"chunk_unit_tokens={self.chunk_unit_tokens} is above max_num_tokens={self.max_num_tokens}"
            raise ValueError(msg)
        return self


class DispatchPolicy(StrEnum):
    """Which side's resources a disaggregated request takes first (C2, C3)."""

    CONTEXT_FIRST = "context_first"
    GENERATION_FIRST = "generation_first"


class CentralConfig(FrozenModel):
    """Admission, dispatch and liveness, as the central scheduler sees them."""

    max_queued_requests: int = Field(1024, gt=0)
    max_running_per_context_worker: int = Field(32, gt=0, description="Attempts sent to one context worker at once.")
    max_offers_per_generation_worker: int = Field(64, gt=0, description="Attempts offered or held there at once.")
    dispatch: DispatchPolicy = DispatchPolicy.CONTEXT_FIRST
    heartbeat_s: float = Field(0.5, gt=0)
    missed_heartbeats: int = Field(3, gt=0, description="Heartbeats in a row whose absence means dead.")
    door_deadline_s: float = Field(10.0, gt=0)
    request_deadline_s: float = Field(600.0, gt=0, description="From submission to the terminal event.")
