"""The paged KV cache of one worker: pages, reuse, transactions, leases, and the audit.

Public names are here; `manager.storage` and the page structures stay inside. Importing this package
does not import torch.
"""

from manager.adapters import AdapterLoad, AdapterSizes
from manager.block_hashes import block_hashes, effective_scope
from manager.cache_request import CacheRequest
from manager.errors import (
    CacheConfigError,
    CapacityError,
    CopyFailedError,
    CorruptedError,
    LogicError,
    ManagerError,
)
from manager.events import KVEvent, KVEventKind, replay
from manager.geometry import CacheGeometry, LayerGroup, LayerSpec, PoolGroup
from manager.grants import Grant, PageCost, Refusal, RefusalReason
from manager.ids import (
    AdapterId,
    BlockHash,
    BlockOrdinal,
    CacheMember,
    Epoch,
    IndexSlot,
    LayerGroupId,
    LayerId,
    LeaseId,
    PoolGroupId,
    RequestId,
    ReuseScope,
    SlotId,
    Tier,
    TierLevel,
    TokenId,
    WorkerName,
)
from manager.interface import KVCacheManager, Savepoint, Transaction
from manager.kv_cache_manager import KVCacheManagerV2
from manager.page_location import PageLease, PageLocation
from manager.stats import Availability, ManagerStats, PageCounts

__all__ = [
    "AdapterId",
    "AdapterLoad",
    "AdapterSizes",
    "Availability",
    "BlockHash",
    "BlockOrdinal",
    "CacheConfigError",
    "CacheGeometry",
    "CacheMember",
    "CacheRequest",
    "CapacityError",
    "CopyFailedError",
    "CorruptedError",
    "Epoch",
    "Grant",
    "IndexSlot",
    "KVCacheManager",
    "KVCacheManagerV2",
    "KVEvent",
    "KVEventKind",
    "LayerGroup",
    "LayerGroupId",
    "LayerId",
    "LayerSpec",
    "LeaseId",
    "LogicError",
    "ManagerError",
    "ManagerStats",
    "PageCost",
    "PageCounts",
    "PageLease",
    "PageLocation",
    "PoolGroup",
    "PoolGroupId",
    "Refusal",
    "RefusalReason",
    "RequestId",
    "ReuseScope",
    "Savepoint",
    "SlotId",
    "Tier",
    "TierLevel",
    "TokenId",
    "Transaction",
    "WorkerName",
    "block_hashes",
    "effective_scope",
    "replay",
]
