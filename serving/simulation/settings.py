"""`SimulationSettings`: what a simulated deployment is made of. Frozen values with units in their names."""

from dataclasses import dataclass, field

from configs import (
    CentralConfig,
    ClusterConfig,
    DeviceTierConfig,
    HostTierConfig,
    KVCacheConfig,
    RouterConfig,
    SchedulerConfig,
    TierConfig,
    TransferConfig,
)
from manager import CacheGeometry, LayerId, LayerSpec
from serving.simulation.cost_model import CostModel

_KV_HEADS = 3
_HEAD_DIM = 64
_NUM_LAYERS = 30
_BYTES_PER_ELEMENT = 2
_EVENT_QUEUE_BLOCKS = 1 << 16
BYTES_PER_TOKEN = 2 * _NUM_LAYERS * _KV_HEADS * _HEAD_DIM * _BYTES_PER_ELEMENT


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultSettings:
    """What goes wrong, and how often; drawn from the run's seed.

    Attributes:
        transfer_failure_share: reads that the transport ends as failed half-way.
        transfer_stall_share: reads that take `transfer_stall_s` longer.
        step_failure_share: steps in which the engine raises.
        worker_deaths: deaths in all, at random times among random workers.
        death_window_s: deaths happen in this much time from the first arrival on.
        restart_s: from a death to the next life.
    """

    transfer_failure_share: float = 0.0
    transfer_stall_share: float = 0.0
    transfer_stall_s: float = 15.0
    step_failure_share: float = 0.0
    worker_deaths: int = 0
    death_window_s: float = 60.0
    restart_s: float = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkSettings:
    """What messages and bytes need to get across.

    Attributes:
        message_s: one message between two processes, whatever its size.
        transfer_latency_s: from asking for a read to its first byte.
        bytes_per_s: of one receiver; its reads share it one after the other.
    """

    message_s: float = 1e-3
    transfer_latency_s: float = 100e-6
    bytes_per_s: float = 3e9


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationSettings:
    """One deployment.

    Attributes:
        pages_per_context_worker: device pages.
        pages_per_generation_worker: device pages; a mixed worker has as many.
        host_pages: pages of the host tier of every worker; 0 is without one.
        tier_bytes_per_s: of pages between device, host and disk.
        audit_every: passes between two audits of a worker's manager; 0 never audits.
        seed: of the faults.
        limit_s: virtual seconds after which a run that has not ended is an error.
    """

    cluster: ClusterConfig = field(default_factory=lambda: ClusterConfig(context_workers=4, generation_workers=4))
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    central: CentralConfig = field(
        default_factory=lambda: CentralConfig(max_queued_requests=1 << 20, request_deadline_s=1e6)
    )
    router: RouterConfig = field(default_factory=RouterConfig)
    transfer: TransferConfig = field(default_factory=TransferConfig)
    network: NetworkSettings = field(default_factory=NetworkSettings)
    faults: FaultSettings = field(default_factory=FaultSettings)
    cost: CostModel = field(default_factory=CostModel)
    tokens_per_block: int = 16
    pages_per_context_worker: int = 2048
    pages_per_generation_worker: int = 2048
    host_pages: int = 0
    tier_bytes_per_s: float = 12e9
    audit_every: int = 1
    seed: int = 0
    limit_s: float = 1e6

    @property
    def page_bytes(self) -> int:
        """Bytes of one page."""
        return self.tokens_per_block * BYTES_PER_TOKEN

    def cache(self, *, is_context: bool) -> tuple[CacheGeometry, KVCacheConfig]:
        """Geometry and sizes of one worker's cache. Raises CacheConfigError when they cannot work."""
        pages = self.pages_per_context_worker if is_context else self.pages_per_generation_worker
        tiers: tuple[TierConfig, ...] = (DeviceTierConfig(quota_bytes=pages * self.page_bytes),)
        if self.host_pages:
            tiers = (*tiers, HostTierConfig(quota_bytes=self.host_pages * self.page_bytes))
        config = KVCacheConfig(
            tokens_per_block=self.tokens_per_block,
            tiers=tiers,
            max_sequences=self.scheduler.max_batch_size,
            event_queue_blocks=_EVENT_QUEUE_BLOCKS if self.router.needs_kv_events else 0,
        )
        layers = [LayerSpec(LayerId(number), _KV_HEADS, _HEAD_DIM) for number in range(_NUM_LAYERS)]
        return CacheGeometry.from_layers(layers, config, _BYTES_PER_ELEMENT), config
