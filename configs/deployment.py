"""`DeploymentConfig` joins the sections; `load_deployment` reads a preset or a YAML file.

The border where documents become sections: the only file that needs pydantic and yaml, and it imports
them when it is used.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path

from configs.base import Section
from configs.cache import KVCacheConfig
from configs.cluster import ClusterConfig
from configs.model import EngineConfig
from configs.routing import RouterConfig
from configs.scheduling import CentralConfig, SchedulerConfig
from configs.server import ServerConfig
from configs.transfer import TransferConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentConfig(Section):
    """Everything that a server needs to start."""

    engine: EngineConfig = field(default_factory=EngineConfig)
    cache: KVCacheConfig = field(default_factory=KVCacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    central: CentralConfig = field(default_factory=CentralConfig)
    router: RouterConfig = field(default_factory=RouterConfig)
    transfer: TransferConfig = field(default_factory=TransferConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    server: ServerConfig = field(default_factory=ServerConfig)

    def __post_init__(self) -> None:
        """Refuse sections that disagree: two limits that do deadlock at run time (V21)."""
        if self.scheduler.max_batch_size > self.cache.max_sequences:
            msg = (
                f"scheduler.max_batch_size={self.scheduler.max_batch_size} exceeds "
                f"cache.max_sequences={self.cache.max_sequences}: a batch could not get its index slots"
            )
            raise ValueError(msg)
        if self.transfer.heartbeat_s != self.central.heartbeat_s:
            msg = (
                f"transfer.heartbeat_s={self.transfer.heartbeat_s} differs from "
                f"central.heartbeat_s={self.central.heartbeat_s}"
            )
            raise ValueError(msg)


def preset_names() -> list[str]:
    """Names that `load_deployment` accepts without a file."""
    return sorted(entry.name.removesuffix(".yaml") for entry in files("configs").joinpath("presets").iterdir())


def load_deployment(
    source: str = "local-cpu", overrides: Mapping[str, Mapping[str, object]] | None = None
) -> DeploymentConfig:
    """Read a preset by name or a YAML file by path, then lay `overrides` (section -> key -> value) on top.

    Raises:
        FileNotFoundError: `source` is neither a preset nor a file.
        ValueError: the file is no mapping, or a key or value is refused; the message names each.
    """
    document = read_document(source)
    for section, values in (overrides or {}).items():
        document[section] = {**(document.get(section) or {}), **values}
    return _validate(source, document)


def read_document(source: str) -> dict[str, dict[str, object]]:
    """The sections of a preset or a YAML file, unchecked. Raises as `load_deployment`."""
    import yaml

    if source in preset_names():
        text = files("configs").joinpath("presets", f"{source}.yaml").read_text()
    elif Path(source).is_file():
        text = Path(source).read_text()
    else:
        msg = f"no preset and no file named {source!r}; presets: {', '.join(preset_names())}"
        raise FileNotFoundError(msg)
    try:
        document = yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        msg = f"{source}: not YAML: {error}"
        raise ValueError(msg) from error
    if not isinstance(document, dict):
        msg = f"{source}: expected a mapping of sections, got {type(document).__name__}"
        raise ValueError(msg)
    return document


def parse_setting(text: str) -> tuple[str, str, object]:
    """Read `SECTION.KEY=VALUE`, the value in YAML.

    Raises:
        ValueError: it has another form.
    """
    import yaml

    name, equals, value = text.partition("=")
    section, dot, key = name.partition(".")
    if not (equals and dot and section and key):
        msg = f"setting {text!r}: expected SECTION.KEY=VALUE, such as scheduler.max_num_tokens=256"
        raise ValueError(msg)
    try:
        return section, key, yaml.safe_load(value)
    except yaml.YAMLError as error:
        msg = f"setting {text!r}: the value is no YAML: {error}"
        raise ValueError(msg) from None


def _validate(source: str, document: Mapping[str, object]) -> DeploymentConfig:
    from pydantic import TypeAdapter, ValidationError

    try:
        return TypeAdapter(DeploymentConfig).validate_python(document)
    except ValidationError as error:
        complaints = [f"{'.'.join(map(str, entry['loc'])) or 'deployment'}: {entry['msg']}" for entry in error.errors()]
        msg = f"{source}: " + "; ".join(complaints)
        raise ValueError(msg) from None
