"""The KV cache of one worker: block size and the ordered tiers with their byte quotas."""

from dataclasses import dataclass
from typing import Literal

from configs.base import Section


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceTierConfig(Section):
    """Pages that the engine can read."""

    quota_bytes: int
    tier: Literal["device"] = "device"

    def __post_init__(self) -> None:
        """Refuse bad values."""
        self.require_positive("quota_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTierConfig(Section):
    """Pages in host memory."""

    quota_bytes: int
    tier: Literal["host"] = "host"

    def __post_init__(self) -> None:
        """Refuse bad values."""
        self.require_positive("quota_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskTierConfig(Section):
    """Pages in files of the run folder; they do not survive the process.

    Attributes:
        path: folder for page files; empty means inside the run folder.
    """

    quota_bytes: int
    path: str = ""
    tier: Literal["disk"] = "disk"

    def __post_init__(self) -> None:
        """Refuse bad values."""
        self.require_positive("quota_bytes")


TierConfig = DeviceTierConfig | HostTierConfig | DiskTierConfig

_TIER_ORDER = ("device", "host", "disk")


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheConfig(Section):
    """Geometry and sizes of one worker's KV cache.

    Attributes:
        max_sequences: index slots: caches that can be active at once.
        required_request_tokens: a worker whose pools cannot hold a request of this length refuses to start; 0: it
            announces what they hold, and the door refuses longer ones.
        resume_watermark: a suspended cache resumes only while device use stays below this share.
        event_queue_blocks: block hashes in KV events that may wait to be taken; 0 switches KV events off.
        audit_period_s: seconds between two audits of a running worker; 0 switches them off.
        audit_max_share: of a worker's time that audits may take; a large cache is audited less often.
    """

    tokens_per_block: int = 16
    tiers: tuple[TierConfig, ...] = (DeviceTierConfig(quota_bytes=1 << 30),)
    max_sequences: int = 64
    enable_block_reuse: bool = True
    enable_partial_reuse: bool = True
    required_request_tokens: int = 0
    resume_watermark: float = 1.0
    event_queue_blocks: int = 0
    audit_period_s: float = 2.0
    audit_max_share: float = 0.005

    def __post_init__(self) -> None:
        """Refuse bad values, and tiers in another order than device, host, disk."""
        self.require_positive("tokens_per_block", "max_sequences", "resume_watermark", "audit_max_share")
        self.require_not_negative("audit_period_s", "event_queue_blocks", "required_request_tokens")
        if self.resume_watermark > 1:
            msg = f"resume_watermark={self.resume_watermark} is a share of the device tier: at most 1"
            raise ValueError(msg)
        names = [tier.tier for tier in self.tiers]
        expected = [name for name in _TIER_ORDER if name in names]
        if names != expected or not names or names[0] != "device":
            msg = f"tiers must be device, then host, then disk, each at most once; got {names}"
            raise ValueError(msg)

    @property
    def device_quota_bytes(self) -> int:
        """Bytes of the device tier."""
        return self.tiers[0].quota_bytes
