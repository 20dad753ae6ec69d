"""`BlockRadixTree`: from token prefixes to committed pages, one node per full block.

A node is found by a digest chained over its whole prefix and confirmed by its tokens and its parent:
digests find, tokens decide, so that no collision can ever share a page by mistake. A node lives as long as it
has a page in any layer group or a child. Requests of different reuse scopes start at different roots.

Nodes are small integers over parallel arrays, as pages are (`page.py`).
"""

from array import array
from collections.abc import Iterator, Mapping, MutableSequence, Sequence

import numpy as np

from manager.digests import TOKEN_BYTES, BlockDigests
from manager.errors import LogicError
from manager.ids import ReuseScope
from manager.page import NONE
from manager.storage.journal import Journal
from manager.token_arena import TokenArena, runs

_TOKEN_BYTES = 4
_GROWTH = 256
_FEW = 8


class BlockRadixTree:
    """Nodes, their links and their pages.

    Attributes:
        by_digest: node of each digest, roots included.
        parent: [num_nodes]; NONE for a root.
        pages: per layer group, [num_nodes] page record or NONE.
        scopes: reuse scope of each root.
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
        "scopes",
    )

    def __init__(self, tokens_per_block: int, num_layer_groups: int, journal: Journal) -> None:
        """An empty tree."""
        self._journal = journal
        self._width = tokens_per_block * TOKEN_BYTES
        self.by_digest: dict[int, int] = {}
        self.parent = array("i")
        self.pages = [array("i") for _ in range(num_layer_groups)]
        self._digest = array("q")
        self._first_child = array("i")
        self._next = array("i")
        self._previous = array("i")
        self._tokens = TokenArena(tokens_per_block)
        self.scopes: dict[int, ReuseScope] = {}
        self._spare: list[int] = []
        # Removed in this transaction, sweep by sweep.
        self._limbo: list[list[int]] = []

    def find(self, digests: BlockDigests, first: int, last: int) -> list[int]:
        """Nodes of blocks [first, last), up to the first that is missing or not what its digest says."""
        get = self.by_digest.get
        nodes: list[int] = []
        for digest in digests.chain[first:last]:
            node = get(digest, NONE)
            if node == NONE:
                break
            nodes.append(node)
        if not nodes:
            return nodes
        parent = get(digests.chain[first - 1] if first else digests.root, NONE)
        return nodes[: self._num_agreeing(nodes, parent, digests, first)]

    def _num_agreeing(self, nodes: Sequence[int], parent: int, digests: BlockDigests, first: int) -> int:
        """How many leading nodes really are the blocks from `first` on, behind the node `parent`."""
        if len(nodes) <= _FEW:
            for place, node in enumerate(nodes):
                if not self.matches(node, parent, digests, first + place):
                    return place
                parent = node
            return len(nodes)
        # In numpy, since a long prompt has thousands of blocks; the views live for this call only, as arrays that
        # are looked at cannot grow.
        places = np.array(nodes, np.int32)
        parents = np.frombuffer(self.parent, np.int32)[places]
        agrees = self._tokens.agree(places, digests.packed, first)
        agrees[0] &= parents[0] == parent
        agrees[1:] &= parents[1:] == places[:-1]
        return len(nodes) if agrees.all() else int(agrees.argmin())

    def root(self, digests: BlockDigests) -> int:
        """The scope's root, made when missing."""
        node = self.by_digest.get(digests.root, NONE)
        if node == NONE:
            node = self._insert(NONE, digests.root)
            self.scopes[node] = digests.scope  # not journaled: of a node that is no root it means nothing
        return node

    def insert_chain(self, parent: int, digests: BlockDigests, first: int, last: int) -> list[int]:
        """Make the nodes of blocks [first, last), each the child of the one before; none of them is there yet."""
        count, width = last - first, self._width
        if count == 1:
            node = self._insert(parent, digests.chain[first])
            self._tokens.put_row(node, digests.packed[first * width : last * width])
            return [node]
        while len(self._spare) < count:
            self._extend(max(count, _GROWTH))
        nodes = self._spare[: -count - 1 : -1]
        del self._spare[-count:]
        digest, parents, children = self._digest, self.parent, self._first_child
        keys = digests.chain[first:last]
        self.by_digest.update(zip(keys, nodes, strict=True))
        parents[nodes[0]] = parent
        spans = runs(nodes)
        for start, end in spans:  # a spare node has no neighbours, and the new ones are only children
            at, stop = nodes[start], nodes[end - 1] + 1
            digest[at:stop] = array("q", keys[start:end])
            parents[at + 1 : stop] = array("i", nodes[start : end - 1])
            children[at : stop - 1] = array("i", nodes[start + 1 : end])
            if start:
                parents[at] = nodes[start - 1]
                children[nodes[start - 1]] = at
        self._tokens.put(nodes, spans, digests.packed[first * width : last * width])
        self._link(nodes[0])
        self._journal.push((self._uninsert_chain, (nodes,)))
        return nodes

    def matches(self, node: int, parent: int, digests: BlockDigests, block: int) -> bool:
        """Whether `node`, found by digest, really is this block of this prefix."""
        source = block * self._width
        return self.parent[node] == parent and self.tokens(node) == bytes(digests.packed[source : source + self._width])

    def attach(self, group: int, nodes: Sequence[int], pages: Sequence[int]) -> None:
        """Give nodes their pages of one layer group."""
        column = self.pages[group]
        for node, page in zip(nodes, pages, strict=True):
            if column[node] != NONE:
                msg = f"node {node} has page {column[node]} in layer group {group}; refused page {page}"
                raise LogicError(msg)
            column[node] = page
        self._journal.push((self.put_pages, (column, nodes, None)))

    def detach(self, group: int, nodes: Sequence[int], pages: Sequence[int]) -> None:
        """Take the nodes' `pages` of one layer group; nodes go when nothing is left of them."""
        column = self.pages[group]
        self._journal.push((self.put_pages, (column, nodes, pages)))
        self._sweep(nodes, column)

    def prune(self, node: int) -> None:
        """Remove `node` and then its ancestors, as long as they have neither page nor child."""
        if node != NONE and self._first_child[node] == NONE and not self.has_page(node):
            self._sweep((node,), None)

    def _sweep(self, nodes: Sequence[int], column: MutableSequence[int] | None) -> None:
        """Empty the nodes' places in `column`, and prune each.

        Digests and tokens of removed nodes stay until `publish` lets them be used again, for an undo.
        """
        children, previous, following, parents = self._first_child, self._previous, self._next, self.parent
        digests, by_digest, first, others = self._digest, self.by_digest, self.pages[0], self.pages[1:]
        removed: list[int] = []
        siblings: dict[int, tuple[int, int]] = {}
        self._limbo.append(removed)
        self._journal.push((self._unremove, (removed, siblings)))
        for start in nodes:
            node = start
            if column is not None:
                column[node] = NONE
            while node != NONE and children[node] == NONE and first[node] == NONE:
                if others and any(other[node] != NONE for other in others):
                    break
                parent, before, after = parents[node], previous[node], following[node]
                del by_digest[digests[node]]
                removed.append(node)
                if before == after:  # neither is there
                    if parent != NONE:
                        children[parent] = NONE
                else:
                    siblings[node] = (before, after)
                    self._part(node, before, after)
                node = parent

    def _part(self, node: int, before: int, after: int) -> None:
        """Take a node out from among its siblings."""
        if before != NONE:
            self._next[before] = after
        elif self.parent[node] != NONE:
            self._first_child[self.parent[node]] = after
        if after != NONE:
            self._previous[after] = before
        self._previous[node] = self._next[node] = NONE

    def has_page(self, node: int) -> bool:
        """Whether any layer group has a page there."""
        return any(column[node] != NONE for column in self.pages)

    def tokens(self, node: int) -> bytes:
        """The tokens of the node's block, int32."""
        return self._tokens.packed(node)

    def digest(self, node: int) -> int:
        """The node's digest."""
        return self._digest[node]

    def children(self, node: int) -> Iterator[int]:
        """Children of a node, newest first."""
        child = self._first_child[node]
        while child != NONE:
            yield child
            child = self._next[child]

    def alike(self, parent: int, wanted: bytes, max_children: int) -> list[int]:
        """Children that begin with the same token as `wanted`, among the `max_children` newest, newest first."""
        following = self._next
        newest: list[int] = []
        child = self._first_child[parent]
        while child != NONE and len(newest) < max_children:
            newest.append(child)
            child = following[child]
        return self._tokens.beginning_alike(newest, wanted)

    def _insert(self, parent: int, digest: int) -> int:
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

    def publish(self) -> None:
        """Nodes removed in this transaction may be used again."""
        for removed in self._limbo:
            self._spare.extend(removed)
            if removed and self.parent[removed[-1]] == NONE:  # a root goes after all its children
                self.scopes.pop(removed[-1], None)
        self._limbo.clear()

    def put_pages(self, column: MutableSequence[int], nodes: Sequence[int], pages: Sequence[int] | None) -> None:
        """The inverse of `attach` and `detach`; in a journal, it names nodes whose pages came or went."""
        for node, page in zip(nodes, pages or [NONE] * len(nodes), strict=True):
            column[node] = page

    def _uninsert_chain(self, nodes: Sequence[int]) -> None:
        for node in reversed(nodes):
            self._uninsert(node)

    def _uninsert(self, node: int) -> None:
        del self.by_digest[self._digest[node]]
        self._part(node, self._previous[node], self._next[node])
        self._spare.append(node)

    def _unremove(self, removed: Sequence[int], siblings: Mapping[int, tuple[int, int]]) -> None:
        # In reverse order, the old neighbours are neighbours again.
        self._limbo.pop()
        for node in reversed(removed):
            parent = self.parent[node]
            before, after = siblings.get(node, (NONE, NONE))
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
        empty = array("i", (NONE,)) * count
        for links in (self.parent, self._first_child, self._next, self._previous, *self.pages):
            links.extend(empty)
        self._digest.extend(array("q", (NONE,)) * count)
        self._tokens.extend(count)
        self._spare.extend(range(first + count - 1, first - 1, -1))
