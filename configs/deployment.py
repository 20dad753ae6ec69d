"""`DeploymentConfig` joins the sections; `load_deployment` reads a preset or a YAML file."""

from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path

import yaml
from pydantic import model_validator

from configs.base import FrozenModel
from configs.cache import KVCacheConfig
from configs.cluster import ClusterConfig
from configs.model import EngineConfig
from configs.scheduling import CentralConfig, SchedulerConfig
from configs.server import ServerConfig
from configs.transfer import TransferConfig


class DeploymentConfig(FrozenModel):
    """Everything that a server needs to start."""

    engine: EngineConfig = EngineConfig()
    cache: KVCacheConfig = KVCacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    central: CentralConfig = CentralConfig()
    transfer: TransferConfig = TransferConfig()
    cluster: ClusterConfig = ClusterConfig()
    server: ServerConfig = ServerConfig()

    @model_validator(mode="after")
    def _capacities_agree(self) -> "DeploymentConfig":
        # V21: two limits that disagree deadlock at run time, so they are refused here.
        if self.scheduler.max_batch_size > self.cache.max_sequences:
            msg = (
                f"scheduler.max_batch_size={self.scheduler.max_batch_size} exceeds "
                f"cache.max_sequences={self.cache.max_sequences}: a batch could not get its index slots"
            )
            raise ValueError(msg)
        if self.transfer.heartbeat_s != self.central.heartbeat_s:
            msg = f"transfer.heartbeat_s={self.transfer.heartbeat_s} differs from central.heartbeat_s"
            raise ValueError(msg)
        return self


def preset_names() -> list[str]:
    """Names that `load_deployment` accepts without a file."""
    return sorted(entry.name.removesuffix(".yaml") for entry in files("configs").joinpath("presets").iterdir())


def load_deployment(
    source: str = "local-cpu", overrides: Mapping[str, Mapping[str, object]] | None = None
) -> DeploymentConfig:
    """Read a preset by name or a YAML file by path, then lay `overrides` (section -> key -> value) on top.

    Raises:
        FileNotFoundError: `source` is neither a preset nor a file.
        ValueError: the file is no mapping, or a key or value is refused (pydantic's ValidationError).
    """
    if source in preset_names():
        text = files("configs").joinpath("presets", f"{source}.yaml").read_text()
    elif Path(source).is_file():
        text = Path(source).read_text()
    else:
        msg = f"no preset and no file named {source!r}; presets: {', '.join(preset_names())}"
        raise FileNotFoundError(msg)
    document = yaml.safe_load(text) or {}
    if not isinstance(document, dict):
        msg = f"{source}: expected a mapping of sections, got {type(document).__name__}"
        raise ValueError(msg)
    for section, values in (overrides or {}).items():
        merged = dict(document.get(section) or {})
        merged.update(values)
        document[section] = merged
    return DeploymentConfig.model_validate(document)
