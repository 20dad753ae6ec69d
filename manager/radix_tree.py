"""`BlockRadixTree`: from token prefixes to committed pages, one node per full block.

A node is found by a digest chained over its whole prefix and confirmed by its tokens and its parent:
digests find, tokens decide, so that no collision can ever share a page by mistake. A node lives as long as it
has a page in any layer group or a child. Requests of different reuse scopes start at different roots.

Nodes are small integers over parallel arrays, as pages are (`page.py`).
"""

from array import array
from collections.abc import Iterator, Sequence
from hashlib import sha256

from manager.errors import LogicError
from manager.ids import ReuseScope
from manager.page import NONE
from manager.storage.journal import Journal

_DIGEST_BYTES = 15
"""33 bytes of object header and 15 of digest fill one 48-byte allocation; 16 would take 64."""
_TOKEN_BYTES = 4
_GROWTH = 256


class BlockDigests:
    """Digests of the full blocks of one request, computed once and only as far as needed.

    Attributes:
        root: digest of the reuse scope, where the chain starts.
        chain: digest of each block hashed so far.
        packed: tokens of those blocks, int32.
    """

    __slots__ = ("_tokens_per_block", "chain", "packed", "root")

    def __init__(self, scope: ReuseScope, tokens_per_block: int) -> None:
        """Hash nothing yet."""
        self._tokens_per_block = tokens_per_block
        self.root = sha256(b"scope:" + scope.encode()).digest()[:_DIGEST_BYTES]
        self.chain: list[bytes] = []
        self.packed = bytearray()

    def extend(self, token_ids: Sequence[int], num_blocks: int) -> None:
        """Make sure that the first `num_blocks` blocks of `token_ids` are hashed."""
        chain = self.chain
        if num_blocks <= len(chain):
            return
        size = self._tokens_per_block
        fresh = array("i", token_ids[len(chain) * size : num_blocks * size]).tobytes()
        self.packed += fresh
        width = size * _TOKEN_BYTES
        parent = chain[-1] if chain else self.root
        for offset in range(0, len(fresh), width):
            parent = sha256(parent + fresh[offset : offset + width]).digest()[:_DIGEST_BYTES]
            chain.append(parent)


class BlockRadixTree:
    """Nodes, their links and their pages.

    Attributes:
        by_digest: node of each digest, roots included.
        parent: [num_nodes]; NONE for a root.
        pages: per layer group, [num_nodes] page record or NONE.
    """

    __slots__ = (
        "_digest",
        "_first_child",
        "_journal",
        "_next",
        "_previous",
        "_spare",
        "_tokens",
        "_width",
        "by_digest",
        "pages",
        "parent",
    )

    def __init__(self, tokens_per_block: int, num_layer_groups: int, journal: Journal) -> None:
        """An empty tree."""
        self._journal = journal
        self._width = tokens_per_block * _TOKEN_BYTES
        self.by_digest: dict[bytes, int] = {}
        self.parent = array("i")
        self.pages = [array("i") for _ in range(num_layer_groups)]
        self._digest: list[bytes] = []
        self._first_child = array("i")
        self._next = array("i")
        self._previous = array("i")
        self._tokens = bytearray()
        self._spare: list[int] = []

    def find(self, digests: BlockDigests, first: int, last: int) -> list[int]:
        """Nodes of blocks [first, last), up to the first that is missing or not what its digest says."""
        get = self.by_digest.get
        nodes: list[int] = []
        parent = get(digests.chain[first - 1] if first else digests.root, NONE)
        parents, width, packed = self.parent, self._width, digests.packed
        tokens = memoryview(self._tokens)
        offset = first * width
        for digest in digests.chain[first:last]:
            node = get(digest, NONE)
            if node == NONE or parents[node] != parent:
                break
            at = node * width
            if tokens[at : at + width] != packed[offset : offset + width]:
                break
            nodes.append(node)
            parent = node
            offset += width
        tokens.release()
        return nodes

    def root(self, digests: BlockDigests) -> int:
        """The scope's root, made when missing."""
        node = self.by_digest.get(digests.root, NONE)
        return self._insert(NONE, digests.root) if node == NONE else node

    def insert(self, parent: int, digests: BlockDigests, block: int) -> int:
        """Make the node of a block whose digest is in no node yet."""
        node = self._insert(parent, digests.chain[block])
        at, source = node * self._width, block * self._width
        self._tokens[at : at + self._width] = digests.packed[source : source + self._width]
        return node

    def matches(self, node: int, parent: int, digests: BlockDigests, block: int) -> bool:
        """Whether `node`, found by digest, really is this block of this prefix."""
        source = block * self._width
        return self.parent[node] == parent and self.tokens(node) == digests.packed[source : source + self._width]

    def attach(self, group: int, node: int, page: int) -> None:
        """Give a node its page of one layer group."""
        if self.pages[group][node] != NONE:
            msg = f"node {node} has page {self.pages[group][node]} in layer group {group}; refused page {page}"
            raise LogicError(msg)
        self.pages[group][node] = page
        self._journal.push((self.pages[group].__setitem__, (node, NONE)))

    def detach(self, group: int, node: int) -> None:
        """Take a node's page of one layer group; the node goes when nothing is left of it."""
        page = self.pages[group][node]
        self.pages[group][node] = NONE
        self._journal.push((self.pages[group].__setitem__, (node, page)))
        self.prune(node)

    def prune(self, node: int) -> None:
        """Remove `node` and then its ancestors, as long as they have neither page nor child."""
        while node != NONE and self._first_child[node] == NONE and not self.has_page(node):
            parent = self.parent[node]
            self._remove(node)
            node = parent

    def has_page(self, node: int) -> bool:
        """Whether any layer group has a page there."""
        return any(pages[node] != NONE for pages in self.pages)

    def tokens(self, node: int) -> bytearray:
        """Packed tokens of the node's block."""
        return self._tokens[node * self._width : (node + 1) * self._width]

    def digest(self, node: int) -> bytes:
        """The node's digest."""
        return self._digest[node]

    def children(self, node: int) -> Iterator[int]:
        """Children of a node, newest first."""
        child = self._first_child[node]
        while child != NONE:
            yield child
            child = self._next[child]

    def _insert(self, parent: int, digest: bytes) -> int:
        if not self._spare:
            self._extend(_GROWTH)
        node = self._spare.pop()
        self._digest[node] = digest
        self.parent[node] = parent
        self._link(node)
        self.by_digest[digest] = node
        self._journal.push((self._uninsert, (node,)))
        return node

    def _remove(self, node: int) -> None:
        digest, links = self._digest[node], (self._previous[node], self._next[node])
        del self.by_digest[digest]
        self._unlink(node)
        self._spare.append(node)
        self._journal.push((self._unremove, (node, digest, self.parent[node], links, self.tokens(node))))

    def _link(self, node: int) -> None:
        parent = self.parent[node]
        if parent == NONE:
            return
        first = self._first_child[parent]
        self._next[node] = first
        self._previous[node] = NONE
        if first != NONE:
            self._previous[first] = node
        self._first_child[parent] = node

    def _unlink(self, node: int) -> None:
        parent, before, after = self.parent[node], self._previous[node], self._next[node]
        if before != NONE:
            self._next[before] = after
        elif parent != NONE:
            self._first_child[parent] = after
        if after != NONE:
            self._previous[after] = before

    def _uninsert(self, node: int) -> None:
        del self.by_digest[self._digest[node]]
        self._unlink(node)
        self._next[node] = self._previous[node] = NONE
        self._spare.append(node)

    def _unremove(self, node: int, digest: bytes, parent: int, links: tuple[int, int], tokens: bytearray) -> None:
        # Undone in reverse order, the old neighbours are neighbours again.
        self._spare.pop()
        self._digest[node] = digest
        self.parent[node] = parent
        self._tokens[node * self._width : (node + 1) * self._width] = tokens
        before, after = links
        self._previous[node], self._next[node] = links
        if before != NONE:
            self._next[before] = node
        elif parent != NONE:
            self._first_child[parent] = node
        if after != NONE:
            self._previous[after] = node
        self.by_digest[digest] = node

    def _extend(self, count: int) -> None:
        first = len(self.parent)
        empty = [NONE] * count
        for links in (self.parent, self._first_child, self._next, self._previous, *self.pages):
            links.extend(empty)
        self._digest.extend([b""] * count)
        self._tokens.extend(bytes(count * self._width))
        self._spare.extend(range(first + count - 1, first - 1, -1))
