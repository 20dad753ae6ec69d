"""Frozen, validated configuration of every part of pdserve.

Knows nothing of the parts it configures. Unknown keys are refused, units are in the names.
"""

from configs.cache import DeviceTierConfig, DiskTierConfig, HostTierConfig, KVCacheConfig, TierConfig
from configs.cluster import ClusterConfig
from configs.deployment import DeploymentConfig, load_deployment, parse_setting, preset_names, read_document
from configs.model import DTypeName, EngineConfig, KernelSet, ModelConfig
from configs.routing import RouterConfig, RoutingPolicy
from configs.scheduling import CentralConfig, DispatchPolicy, SchedulerConfig, SchedulingPolicy
from configs.server import ServerConfig
from configs.transfer import TRANSPORTS, TransferConfig

__all__ = [
    "TRANSPORTS",
    "CentralConfig",
    "ClusterConfig",
    "DTypeName",
    "DeploymentConfig",
    "DeviceTierConfig",
    "DiskTierConfig",
    "DispatchPolicy",
    "EngineConfig",
    "HostTierConfig",
    "KVCacheConfig",
    "KernelSet",
    "ModelConfig",
    "RouterConfig",
    "RoutingPolicy",
    "SchedulerConfig",
    "SchedulingPolicy",
    "ServerConfig",
    "TierConfig",
    "TransferConfig",
    "load_deployment",
    "parse_setting",
    "preset_names",
    "read_document",
]
