"""`BlockDigests`: digests chained over the token prefix, one per full block; `DigestMemo` saves computing them twice.

A digest stands for all tokens up to its block's end and for the reuse scope. It is a key to find blocks by; that
they really are the same the tree decides by their tokens, so that it need not be a cryptographic one: Python's keyed
hash takes a third of the time. It means nothing outside this process. Memos are no state: a rollback need not
restore them.
"""

from collections.abc import Sequence
from struct import iter_unpack, pack

from manager.block_hashes import effective_scope
from manager.cache_request import CacheRequest
from manager.ids import RequestId, ReuseScope

_MASK = (1 << 60) - 1
"""Integers of 60 bits take 32 bytes of memory, those of 61 take 48."""
TOKEN_BYTES = 4
_MAX_MEMOS = 1024
_MAX_KEPT_BLOCKS = 1 << 16


def scope_digest(scope: ReuseScope) -> int:
    """Where the chain of a reuse scope starts."""
    return hash(("scope", scope)) & _MASK


def block_digest(parent: int, packed: bytes) -> int:
    """Digest of a block of packed tokens behind the prefix `parent`."""
    return hash((parent, packed)) & _MASK


class BlockDigests:
    """Digests of the full blocks of one request, as far as they were needed.

    Attributes:
        tokens_per_block: positions of a block.
        root: digest of the reuse scope, where the chain starts.
        scope: that reuse scope.
        chain: digest of each block hashed so far.
        packed: tokens of those blocks, int32.
        known: digests of an earlier request that began alike; as long as it does, they are taken over.
    """

    __slots__ = ("chain", "known", "packed", "root", "scope", "tokens_per_block")

    def __init__(self, scope: ReuseScope, tokens_per_block: int) -> None:
        """Hash nothing yet."""
        self.tokens_per_block = tokens_per_block
        self.root = scope_digest(scope)
        self.scope = scope
        self.chain: list[int] = []
        self.packed = bytearray()
        self.known: BlockDigests | None = None

    def extend(self, token_ids: Sequence[int], num_blocks: int) -> None:
        """Make sure that the first `num_blocks` blocks of `token_ids` are hashed."""
        chain = self.chain
        if num_blocks <= len(chain):
            return
        size = self.tokens_per_block
        span = token_ids[len(chain) * size : num_blocks * size]
        fresh = pack(f"{len(span)}i", *span)  # twice as fast as an array of them
        if num_blocks == len(chain) + 1 and self.known is None:  # every decode that fills a block
            self.packed += fresh
            chain.append(hash((chain[-1] if chain else self.root, fresh)) & _MASK)
            return
        taken_over = 0 if self.known is None else self._take_over(fresh)
        self.packed += fresh
        width = size * TOKEN_BYTES
        parent = chain[-1] if chain else self.root
        rest = fresh[taken_over:] if taken_over else fresh
        chain += [parent := hash((parent, block)) & _MASK for (block,) in iter_unpack(f"{width}s", rest)]

    def _take_over(self, fresh: bytes) -> int:
        """Append known digests for as much of `fresh` as agrees; returns its bytes."""
        known, first, width = self.known, len(self.chain), self.tokens_per_block * TOKEN_BYTES
        assert known is not None
        offset = first * width
        count = min(len(known.chain) - first, len(fresh) // width)
        # Halve what is compared until it agrees: prompts differ in their last turn or soon.
        while count > 0 and known.packed[offset : offset + count * width] != fresh[: count * width]:
            count //= 2
            self.known = None
        self.chain += known.chain[first : first + count]
        return max(count, 0) * width


class DigestMemo:
    """Digests by request, for requests that are tried again, and of ended ones, for their next turns."""

    __slots__ = ("_by_first", "_by_request", "_num_kept", "_tokens_per_block")

    def __init__(self, tokens_per_block: int) -> None:
        """Remember nothing yet."""
        self._tokens_per_block = tokens_per_block
        self._by_request: dict[RequestId, tuple[Sequence[int], BlockDigests]] = {}
        self._by_first: dict[int, BlockDigests] = {}
        self._num_kept = 0

    def of(self, request: CacheRequest, limit: int) -> BlockDigests:
        """Digests of a request about to look for a prefix of `limit` tokens.

        The same list of tokens, which only ever grows at its end, has the same digests as before.
        """
        memo = self._by_request.get(request.request_id)
        if memo is not None and memo[0] is request.token_ids:
            return memo[1]
        digests = BlockDigests(
            effective_scope(request.reuse_scope, request.adapter_id, request.encoder_token_ids), self._tokens_per_block
        )
        if limit >= self._tokens_per_block:
            digests.extend(request.token_ids, 1)
            digests.known = self._by_first.get(digests.chain[0])
        if len(self._by_request) >= _MAX_MEMOS:
            del self._by_request[next(iter(self._by_request))]
        self._by_request[request.request_id] = (request.token_ids, digests)
        return digests

    def keep(self, request_id: RequestId) -> None:
        """A request ends: its digests may serve the conversation's next turn."""
        memo = self._by_request.pop(request_id, None)
        if memo is None or not memo[1].chain:
            return
        digests = memo[1]
        digests.known = None
        old = self._by_first.pop(digests.chain[0], None)
        self._num_kept += len(digests.chain) - (len(old.chain) if old else 0)
        self._by_first[digests.chain[0]] = digests
        while self._num_kept > _MAX_KEPT_BLOCKS and len(self._by_first) > 1:
            oldest = self._by_first.pop(next(iter(self._by_first)))
            self._num_kept -= len(oldest.chain)
