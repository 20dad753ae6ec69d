"""Hashes of blocks that mean the same in every process: the keys of KV events.

A block's hash is chained over its whole prefix, from its reuse scope on. `digests` has others, for the tree: Python's
keyed hash is faster, but every process has a key of its own. A collision here can only send a request to a worker
that does not hold its prefix.
"""

from collections.abc import Sequence
from hashlib import blake2b
from struct import Struct, pack

from manager.ids import AdapterId, BlockHash, ReuseScope

_BYTES = 8
_CHAIN = Struct("<Q")


def effective_scope(scope: ReuseScope, adapter_id: AdapterId | None, encoder_token_ids: Sequence[int]) -> ReuseScope:
    """Keys and values depend on the adapter and on the encoder's input, too, whatever scope the request asks for."""
    if adapter_id is None and not encoder_token_ids:
        return scope
    encoder = hash(tuple(encoder_token_ids)) if encoder_token_ids else 0  # of integers: the same in every process
    return ReuseScope(f"{adapter_id or ''} {encoder} {scope}")


def scope_hash(scope: ReuseScope) -> BlockHash:
    """Where the chain of a reuse scope starts."""
    return BlockHash(int.from_bytes(blake2b(scope.encode(), digest_size=_BYTES, person=b"scope").digest(), "little"))


def next_hash(parent: BlockHash, packed: bytes) -> BlockHash:
    """Hash of the block of `packed` tokens (int32, little-endian) behind the prefix `parent`."""
    return BlockHash(int.from_bytes(blake2b(_CHAIN.pack(parent) + packed, digest_size=_BYTES).digest(), "little"))


def block_hashes(token_ids: Sequence[int], tokens_per_block: int, scope: ReuseScope) -> list[BlockHash]:
    """Hashes of the full blocks of `token_ids`, in order; `scope` is `effective_scope` of the request."""
    count = len(token_ids) // tokens_per_block
    packed = pack(f"<{count * tokens_per_block}i", *token_ids[: count * tokens_per_block])
    width = len(packed) // count if count else 0
    parent = scope_hash(scope)
    hashes = []
    for block in range(count):
        parent = next_hash(parent, packed[block * width : (block + 1) * width])
        hashes.append(parent)
    return hashes
