"""`BlockRadixTree`: from token prefixes to committed pages, one node per full block.

A node is found by a digest chained over its whole prefix and confirmed by its tokens and its parent:
digests find, tokens decide, so that no collision can ever share a page by mistake. A node lives as long as it
has a page in any layer group or a child. Requests of different reuse scopes start at different roots.

Nodes are small integers over parallel arrays, as pages are (`page.py`).
"""

from array import array
from collections.abc import Iterator, MutableSequence, Sequence

import numpy as np

from manager.digests import TOKEN_BYTES, BlockDigests
from manager.errors import LogicError
from manager.page import NONE
from manager.storage.journal import Journal

_TOKEN_BYTES = 4
_GROWTH = 256


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
        "_limbo",
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
        self._width = tokens_per_block * TOKEN_BYTES
        self.by_digest: dict[bytes, int] = {}
        self.parent = array("i")
        self.pages = [array("i") for _ in range(num_layer_groups)]
        self._digest: list[bytes] = []
        self._first_child = array("i")
        self._next = array("i")
        self._previous = array("i")
        self._tokens = bytearray()
        self._spare: list[int] = []
        self._limbo: list[int] = []

    def find(self, digests: BlockDigests, first: int, last: int) -> list[int]:
        """Nodes of blocks [first, last), up to the first that is missing or not what its digest says."""
        get = self.by_digest.get
        nodes = [get(digest, NONE) for digest in digests.chain[first:last]]
        if NONE in nodes:
            del nodes[nodes.index(NONE) :]
        if not nodes:
            return nodes
        parent = get(digests.chain[first - 1] if first else digests.root, NONE)
        # In numpy, since a long prompt has thousands of blocks; the views live for this call only, as arrays that
        # are looked at cannot grow.
        place = np.array(nodes, np.int32)
        expected = np.frombuffer(digests.packed, np.int32).reshape(-1, digests.tokens_per_block)
        stored = np.frombuffer(self._tokens, np.int32).reshape(-1, digests.tokens_per_block)
        parents = np.frombuffer(self.parent, np.int32)[place]
        agrees = (stored[place] == expected[first : first + len(nodes)]).all(axis=1)
        agrees[0] &= parents[0] == parent
        agrees[1:] &= parents[1:] == place[:-1]
        if not agrees.all():
            del nodes[int(agrees.argmin()) :]
        return nodes

    def root(self, digests: BlockDigests) -> int:
        """The scope's root, made when missing."""
        node = self.by_digest.get(digests.root, NONE)
        return self._insert(NONE, digests.root) if node == NONE else node

    def insert_chain(self, parent: int, digests: BlockDigests, first: int, last: int) -> list[int]:
        """Make the nodes of blocks [first, last), each the child of the one before; none of them is there yet."""
        count, width = last - first, self._width
        while len(self._spare) < count:
            self._extend(max(count, _GROWTH))
        nodes = self._spare[: -count - 1 : -1]
        del self._spare[-count:]
        digest, parents, children, by_digest = self._digest, self.parent, self._first_child, self.by_digest
        tokens, packed = self._tokens, digests.packed
        at = first * width
        for node, key in zip(nodes, digests.chain[first:last], strict=True):
            digest[node] = key
            by_digest[key] = node
            tokens[node * width : (node + 1) * width] = packed[at : at + width]
            parents[node] = parent
            if node != nodes[0]:  # an only child
                children[parent] = node
                self._next[node] = self._previous[node] = NONE
            parent = node
            at += width
        self._link(nodes[0])
        self._journal.push((self._uninsert_chain, (nodes,)))
        return nodes

    def matches(self, node: int, parent: int, digests: BlockDigests, block: int) -> bool:
        """Whether `node`, found by digest, really is this block of this prefix."""
        source = block * self._width
        return self.parent[node] == parent and self.tokens(node) == digests.packed[source : source + self._width]

    def attach(self, group: int, nodes: Sequence[int], pages: Sequence[int]) -> None:
        """Give nodes their pages of one layer group."""
        column = self.pages[group]
        for node, page in zip(nodes, pages, strict=True):
            if column[node] != NONE:
                msg = f"node {node} has page {column[node]} in layer group {group}; refused page {page}"
                raise LogicError(msg)
            column[node] = page
        self._journal.push((self._put_pages, (column, nodes, None)))

    def detach(self, group: int, nodes: Sequence[int]) -> None:
        """Take the nodes' pages of one layer group; nodes go when nothing is left of them."""
        column = self.pages[group]
        self._journal.push((self._put_pages, (column, nodes, [column[node] for node in nodes])))
        for node in nodes:
            column[node] = NONE
            self.prune(node)

    def prune(self, node: int) -> None:
        """Remove `node` and then its ancestors, as long as they have neither page nor child.

        Their digests and tokens stay until `publish` lets them be used again, for an undo.
        """
        children, previous, following = self._first_child, self._previous, self._next
        while node != NONE and children[node] == NONE and not self.has_page(node):
            parent, before, after = self.parent[node], previous[node], following[node]
            del self.by_digest[self._digest[node]]
            if before != NONE:
                following[before] = after
            elif parent != NONE:
                children[parent] = after
            if after != NONE:
                previous[after] = before
            self._limbo.append(node)
            self._journal.push((self._unremove, (node, before, after)))
            node = parent

    def has_page(self, node: int) -> bool:
        """Whether any layer group has a page there."""
        for column in self.pages:  # noqa: SIM110 - a generator costs as much as the rest of `prune`
            if column[node] != NONE:
                return True
        return False

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

    def alike(self, parent: int, wanted: bytes, max_children: int) -> Iterator[int]:
        """Children that begin with the same token as `wanted`, among the `max_children` newest."""
        tokens, width, following = self._tokens, self._width, self._next
        head = wanted[:TOKEN_BYTES]
        child = self._first_child[parent]
        while child != NONE and max_children:
            at = child * width
            if tokens[at : at + TOKEN_BYTES] == head:
                yield child
            child = following[child]
            max_children -= 1

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

    def publish(self) -> None:
        """Nodes removed in this transaction may be used again."""
        for node in self._limbo:
            self._digest[node] = b""
        self._spare.extend(self._limbo)
        self._limbo.clear()

    def _put_pages(self, column: MutableSequence[int], nodes: Sequence[int], pages: Sequence[int] | None) -> None:
        for node, page in zip(nodes, pages or [NONE] * len(nodes), strict=True):
            column[node] = page

    def _uninsert_chain(self, nodes: Sequence[int]) -> None:
        for node in reversed(nodes):
            self._uninsert(node)

    def _uninsert(self, node: int) -> None:
        del self.by_digest[self._digest[node]]
        self._unlink(node)
        self._next[node] = self._previous[node] = NONE
        self._spare.append(node)

    def _unremove(self, node: int, before: int, after: int) -> None:
        # Undone in reverse order, the old neighbours are neighbours again.
        self._limbo.pop()
        parent = self.parent[node]
        self._previous[node], self._next[node] = before, after
        if before != NONE:
            self._next[before] = node
        elif parent != NONE:
            self._first_child[parent] = node
        if after != NONE:
            self._previous[after] = node
        self.by_digest[self._digest[node]] = node

    def _extend(self, count: int) -> None:
        first = len(self.parent)
        empty = [NONE] * count
        for links in (self.parent, self._first_child, self._next, self._previous, *self.pages):
            links.extend(empty)
        self._digest.extend([b""] * count)
        self._tokens.extend(bytes(count * self._width))
        self._spare.extend(range(first + count - 1, first - 1, -1))
