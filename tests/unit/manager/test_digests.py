"""Digests find blocks, tokens decide: the chain, its memos, and the rows of tokens."""

import numpy as np
import pytest

from manager import ReuseScope
from manager.digests import BlockDigests, DigestMemo, block_digest, scope_digest
from manager.radix_tree import BlockRadixTree
from manager.storage.journal import Journal
from manager.token_arena import TokenArena, runs
from tests.fakes.cache_request import FakeRequest

SCOPE = ReuseScope("")


def packed(tokens: list[int]) -> bytes:
    return np.array(tokens, np.int32).tobytes()


def test_a_digest_stands_for_the_whole_prefix_and_its_scope() -> None:
    chains = []
    for scope, tokens in (("", [1, 2, 3, 4]), ("", [9, 2, 3, 4]), ("other", [1, 2, 3, 4])):
        digests = BlockDigests(ReuseScope(scope), 2)
        digests.extend(tokens, 2)
        chains.append(digests.chain[1])
    assert len(set(chains)) == 3


def test_extending_hashes_what_is_new_only() -> None:
    digests = BlockDigests(SCOPE, 2)
    digests.extend([1, 2, 3, 4], 1)
    first = list(digests.chain)
    digests.extend([1, 2, 3, 4], 2)
    assert digests.chain[:1] == first
    assert digests.chain[1] == block_digest(first[0], packed([3, 4]))
    assert first[0] == block_digest(scope_digest(SCOPE), packed([1, 2]))


@pytest.mark.parametrize("shared", [2, 5, 8, 9])
def test_a_further_turn_takes_over_what_agrees(shared: int) -> None:
    memo = DigestMemo(2)
    first = FakeRequest("a", list(range(20)))
    memo.of(first, 20).extend(first.token_ids, 10)
    memo.keep(first.request_id)
    turn = FakeRequest("b", [*range(2 * shared), *range(100, 120)])
    digests = memo.of(turn, 40)
    assert digests.known is not None
    digests.extend(turn.token_ids, 10)
    alone = BlockDigests(SCOPE, 2)
    alone.extend(turn.token_ids, 10)
    assert digests.chain == alone.chain


def test_a_request_that_is_tried_again_is_not_hashed_again() -> None:
    memo = DigestMemo(2)
    request = FakeRequest("a", list(range(8)))
    digests = memo.of(request, 8)
    assert memo.of(request, 8) is digests
    assert memo.of(FakeRequest("a", list(range(8))), 8) is not digests, "another list may hold other tokens"


def test_a_digest_that_means_two_things_shares_nothing() -> None:
    tree = BlockRadixTree(2, 1, Journal())
    digests = BlockDigests(SCOPE, 2)
    digests.extend([1, 2, 3, 4], 2)
    tree.insert_chain(tree.root(digests), digests, 0, 2)
    forged = BlockDigests(SCOPE, 2)
    forged.extend([1, 2, 9, 9], 2)
    forged.chain[1] = digests.chain[1]
    assert len(tree.find(forged, 0, 2)) == 1
    assert len(tree.find(digests, 0, 2)) == 2


@pytest.mark.parametrize("count", [1, 3, 40])
@pytest.mark.parametrize("large", [65_535, 65_536, 2**31 - 1])
def test_rows_come_back_as_written_whatever_the_vocabulary(count: int, large: int) -> None:
    arena = TokenArena(2)
    arena.extend(128)
    arena.put_row(0, packed([7, 8]))
    rows = [2 * n + 1 for n in range(count)]
    tokens = [large - n for n in range(2 * count)]
    arena.put(rows, runs(rows), packed(tokens))
    assert arena.packed(0) == packed([7, 8])
    assert [arena.packed(row) for row in rows] == [packed(tokens[2 * n : 2 * n + 2]) for n in range(count)]
    assert arena.beginning_alike([0, *rows], packed(tokens[-2:])) == rows[-1:]
    assert arena.agree(np.array(rows, np.int32), packed(tokens), 0).all()
    assert not arena.agree(np.array([0], np.int32), packed([7, 9]), 0).any()
