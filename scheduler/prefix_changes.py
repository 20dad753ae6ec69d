"""`PrefixesChanged`: what a worker's cache gained and lost, by block hash; and how a prompt is hashed to look it up."""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from struct import pack
from typing import NewType

BlockHash = NewType("BlockHash", int)
"""Stands for all tokens up to a block's end and for the reuse scope; the same in every process of a server."""
_HASH_BYTES = 7  # fits the small integers of pickle and the 60 bits that Python keeps in 32 bytes
_TOKEN_BYTES = 4


@dataclass(frozen=True, slots=True)
class PrefixesChanged:
    """The worker's cached blocks, since the last such report of this life.

    Attributes:
        stored: can be reused there now, in whatever tier.
        removed: can no longer.
        is_listing: `stored` is everything, and what was said before is void: a new term asked, or the worker has
            lost count of its changes.
    """

    stored: tuple[BlockHash, ...] = ()
    removed: tuple[BlockHash, ...] = ()
    is_listing: bool = False


def hash_blocks(token_ids: Sequence[int], tokens_per_block: int, reuse_scope: str) -> Sequence[BlockHash]:
    """Hashes of the full blocks of a prompt, in order."""
    parent = blake2b(reuse_scope.encode(), digest_size=_HASH_BYTES).digest()
    num_tokens = len(token_ids) // tokens_per_block * tokens_per_block
    packed = pack(f"<{num_tokens}i", *token_ids[:num_tokens])
    width = tokens_per_block * _TOKEN_BYTES
    hashes = []
    for offset in range(0, len(packed), width):
        parent = blake2b(parent + packed[offset : offset + width], digest_size=_HASH_BYTES).digest()
        hashes.append(BlockHash(int.from_bytes(parent, "little")))
    return hashes
