"""The KV cache of one worker: block size and the ordered tiers with their byte quotas."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from configs.base import FrozenModel


class DeviceTierConfig(FrozenModel):
    """Pages that the engine can read."""

    tier: Literal["device"] = "device"
    quota_bytes: int = Field(gt=0)


class HostTierConfig(FrozenModel):
    """Pages in host memory."""

    tier: Literal["host"] = "host"
    quota_bytes: int = Field(gt=0)


class DiskTierConfig(FrozenModel):
    """Pages in files of the run folder; they do not survive the process."""

    tier: Literal["disk"] = "disk"
    quota_bytes: int = Field(gt=0)
    path: str = Field("", description="Folder for page files; empty means inside the run folder.")


TierConfig = Annotated[DeviceTierConfig | HostTierConfig | DiskTierConfig, Field(discriminator="tier")]

_TIER_ORDER = ("device", "host", "disk")


class KVCacheConfig(FrozenModel):
    """Geometry and sizes of one worker's KV cache."""

    tokens_per_block: int = Field(16, gt=0)
    tiers: tuple[TierConfig, ...] = (DeviceTierConfig(quota_bytes=1 << 30),)
    max_sequences: int = Field(64, gt=0, description="Index slots: caches that can be active at once.")
    enable_block_reuse: bool = True
    enable_partial_reuse: bool = True
    resume_watermark: float = Field(
        1.0, gt=0, le=1.0, description="A suspended cache resumes only while device use stays below this share."
    )

    @model_validator(mode="after")
    def _tiers_in_order(self) -> "KVCacheConfig":
        names = [tier.tier for tier in self.tiers]
        expected = [name for name in _TIER_ORDER if name in names]
        if names != expected or not names or names[0] != "device":
            msg = f"tiers must be device, then host, then disk, each at most once; got {names}"
            raise ValueError(msg)
        return self

    @property
    def device_quota_bytes(self) -> int:
        """Bytes of the device tier."""
        return self.tiers[0].quota_bytes
