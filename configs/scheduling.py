"""Budgets and policies of the iteration scheduler (one per worker) and of the central scheduler."""

from dataclasses import dataclass
from enum import StrEnum

from configs.base import Section


class SchedulingPolicy(StrEnum):
    """What a worker promises to a request that it admits."""

    MAX_UTILIZATION = "max_utilization"
    GUARANTEED_NO_EVICT = "guaranteed_no_evict"


class ChunkingPolicy(StrEnum):
    """How the token budget is shared among contexts."""

    FIRST_COME_FIRST_SERVED = "first_come_first_served"
    EQUAL_PROGRESS = "equal_progress"


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig(Section):
    """Budgets of one iteration.

    Attributes:
        max_num_tokens: rows of one step: context tokens plus decode tokens.
        max_batch_size: requests in one step.
        chunk_unit_tokens: a context chunk that is not the last is a multiple of this.
        max_context_tokens_beside_decodes: context tokens of a step in which a request decodes; 0 is no bound of its
            own. A generation worker without one of its own uses the chunk unit, so that a turn it computes itself
            never makes its streams wait for more than that at once.
        max_step_retries: failed steps after which the step's requests fail.
        arrivals_per_priority: one priority level more goes before this many that arrived before it, and
            before no others, so that no request waits for ever.
        defer_duplicate_prefixes: a new context waits a pass while another computes blocks that it can use.
        fresh_generation_first: a freshly received request gets its first decode step before all others.
        recompute_remote_min_tokens: on a generation worker, a request with at least this many known tokens
            that loses its pages leaves for a new attempt elsewhere instead of being computed again here; 0
            keeps all of them.
    """

    max_num_tokens: int = 512
    max_batch_size: int = 64
    chunk_unit_tokens: int = 64
    max_context_tokens_beside_decodes: int = 0
    policy: SchedulingPolicy = SchedulingPolicy.MAX_UTILIZATION
    chunking: ChunkingPolicy = ChunkingPolicy.FIRST_COME_FIRST_SERVED
    max_step_retries: int = 1
    arrivals_per_priority: int = 64
    defer_duplicate_prefixes: bool = True
    fresh_generation_first: bool = False
    recompute_remote_min_tokens: int = 0

    def __post_init__(self) -> None:
        """Refuse bad values, and a chunk that no step could hold."""
        self.require_positive("max_num_tokens", "max_batch_size", "chunk_unit_tokens")
        self.require_not_negative("max_step_retries", "arrivals_per_priority", "recompute_remote_min_tokens")
        self.require_not_negative("max_context_tokens_beside_decodes")
        if self.chunk_unit_tokens > self.max_num_tokens:
            msg = f"chunk_unit_tokens={self.chunk_unit_tokens} is above max_num_tokens={self.max_num_tokens}"
            raise ValueError(msg)
        if 0 < self.max_context_tokens_beside_decodes < self.chunk_unit_tokens:
            bound = self.max_context_tokens_beside_decodes
            msg = f"max_context_tokens_beside_decodes={bound} is below chunk_unit_tokens={self.chunk_unit_tokens}"
            raise ValueError(msg)


class DispatchPolicy(StrEnum):
    """Which side's resources a disaggregated request takes first (C2, C3)."""

    CONTEXT_FIRST = "context_first"
    GENERATION_FIRST = "generation_first"


@dataclass(frozen=True, slots=True, kw_only=True)
class CentralConfig(Section):
    """Admission, dispatch and liveness, as the central scheduler sees them.

    Attributes:
        max_running_per_context_worker: attempts sent to one context worker at once.
        max_offers_per_generation_worker: attempts offered or held there at once.
        missed_heartbeats: heartbeats in a row whose absence means dead.
        door_deadline_s: a door that is silent for so long is dead, and its requests are cancelled.
        request_deadline_s: from submission to the terminal event.
        restart_grace_s: requests wait so long for a role whose workers are all being restarted, and doors for a
            central scheduler; loading a model is part of it.
        share_choices: choices of one prompt share its prefill and its transfer; never in generation-first dispatch.
        standby: a second central scheduler is kept ready, so that a term begins at once when the first is lost.
        takeover_timeout_s: a new term waits so long for the answers of workers and doors that live.
        arrivals_per_priority: as of the iteration scheduler: one priority level more goes before this many that
            arrived before it, and before no others.
    """

    max_queued_requests: int = 1024
    max_running_per_context_worker: int = 32
    max_offers_per_generation_worker: int = 64
    dispatch: DispatchPolicy = DispatchPolicy.CONTEXT_FIRST
    heartbeat_s: float = 0.5
    missed_heartbeats: int = 3
    door_deadline_s: float = 10.0
    request_deadline_s: float = 600.0
    restart_grace_s: float = 60.0
    standby: bool = True
    takeover_timeout_s: float = 5.0
    arrivals_per_priority: int = 64
    share_choices: bool = True

    def __post_init__(self) -> None:
        """Refuse bad values."""
        self.require_positive("max_queued_requests", "max_running_per_context_worker")
        self.require_positive("max_offers_per_generation_worker", "heartbeat_s", "missed_heartbeats")
        self.require_positive("door_deadline_s", "request_deadline_s", "restart_grace_s", "takeover_timeout_s")
        self.require_not_negative("arrivals_per_priority")
