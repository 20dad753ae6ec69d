"""Names for the integers and strings of the KV cache, so that none can pass for another.

Imports nothing of the project. A `RequestId` here names one *attempt* of a request on one worker
(unique per attempt, C8); the door's id of the whole request is another type in `scheduler`.
"""

from enum import IntEnum, StrEnum
from typing import NewType

RequestId = NewType("RequestId", str)
TokenId = NewType("TokenId", int)
BlockOrdinal = NewType("BlockOrdinal", int)
"""The n-th block of one request; covers positions [n * tokens_per_block, (n + 1) * tokens_per_block)."""
SlotId = NewType("SlotId", int)
"""A physical place of one pool group in one tier."""
IndexSlot = NewType("IndexSlot", int)
"""A row of the per-sequence tables; bounded by `max_sequences`."""
LayerId = NewType("LayerId", int)
LayerGroupId = NewType("LayerGroupId", int)
PoolGroupId = NewType("PoolGroupId", int)
ReuseScope = NewType("ReuseScope", str)
"""Blocks are shared only inside one scope (adapter, salt); the empty string is the common one."""
BlockHash = NewType("BlockHash", int)
"""Of a block and all before it, 64 bits; the same in every process (`block_hashes`)."""
AdapterId = NewType("AdapterId", str)
LeaseId = NewType("LeaseId", int)
Epoch = NewType("Epoch", int)
"""One life of a worker; carried by every lease that it gives."""
WorkerName = NewType("WorkerName", str)


class CacheMember(StrEnum):
    """Whose keys and values a layer keeps (M4)."""

    PRIMARY = "primary"
    DRAFT = "draft"
    """Of the draft model: the same tokens, the same blocks, the same cursor as the primary's."""
    CROSS = "cross"
    """Of the encoder's output: a key and a length of its own; whole or absent."""


class TierLevel(IntEnum):
    """Where a page lives, fastest first."""

    DEVICE = 0
    HOST = 1
    DISK = 2


class Tier(StrEnum):
    """The words for `TierLevel` in configuration, reports and /cluster/state."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"
