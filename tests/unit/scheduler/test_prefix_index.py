"""PrefixIndex: overlaps by worker, lives that end, listings, bounded memory, and a naive model under random changes."""

from random import Random

import pytest

from manager import BlockHash, WorkerName
from scheduler.prefix_changes import PrefixesChanged
from scheduler.prefix_index import PrefixIndex

_A, _B, _C = (WorkerName(name) for name in "abc")


def _blocks(*numbers: int) -> tuple[BlockHash, ...]:
    return tuple(BlockHash(number) for number in numbers)


def _index(max_blocks: int = 100) -> PrefixIndex:
    index = PrefixIndex(max_blocks)
    index.apply(_A, PrefixesChanged(stored=_blocks(1, 2, 3)))
    index.apply(_B, PrefixesChanged(stored=_blocks(1, 9)))
    return index


def test_an_overlap_is_the_leading_blocks_that_a_worker_has() -> None:
    index = _index()
    assert index.cached_blocks(_blocks(1, 2, 3, 4)) == {_A: 3, _B: 1}
    assert index.cached_blocks(_blocks(1, 2, 3)) == {_A: 3, _B: 1}
    assert index.cached_blocks(_blocks(7, 1)) == {}
    assert index.cached_blocks(()) == {}


def test_what_was_evicted_in_the_middle_ends_the_overlap() -> None:
    index = _index()
    index.apply(_A, PrefixesChanged(removed=_blocks(2)))
    assert index.cached_blocks(_blocks(1, 2, 3)) == {_A: 1, _B: 1}
    index.audit()


def test_the_blocks_of_a_life_go_with_it_and_leave_those_of_others() -> None:
    index = _index()
    index.forget(_A)
    index.forget(_A)
    assert index.cached_blocks(_blocks(1, 2, 3)) == {_B: 1}
    assert index.num_blocks == index.num_held(_B) == 2
    index.apply(_C, PrefixesChanged(stored=_blocks(9)))
    assert index.cached_blocks(_blocks(9)) == {_B: 1, _C: 1}
    index.audit()


def test_a_listing_voids_what_was_said_before() -> None:
    index = _index()
    index.apply(_A, PrefixesChanged(stored=_blocks(1, 5), is_listing=True))
    assert index.cached_blocks(_blocks(1, 2, 3)) == {_A: 1, _B: 1}
    assert index.num_held(_A) == 2
    assert index.counters["listings"] == 1


def test_blocks_beyond_the_bound_are_counted_and_not_found() -> None:
    index = _index(max_blocks=4)
    index.apply(_B, PrefixesChanged(stored=_blocks(2, 20, 21)))
    assert index.num_blocks == 4
    assert index.counters["unindexed_blocks"] == 2
    assert index.cached_blocks(_blocks(1, 2)) == {_A: 2, _B: 2}, "a known block finds a further holder all the same"
    index.apply(_B, PrefixesChanged(removed=_blocks(20, 9)))
    assert index.num_blocks == 3
    index.audit()


@pytest.mark.parametrize("seed", range(20))
def test_the_index_equals_a_set_of_blocks_per_worker_under_random_changes(seed: int) -> None:
    random = Random(seed)
    index, model = PrefixIndex(1000), {worker: set[int]() for worker in (_A, _B, _C)}
    for _ in range(200):
        worker = random.choice((_A, _B, _C))
        blocks = random.sample(range(12), random.randrange(6))
        match random.randrange(4):
            case 0:
                index.apply(worker, PrefixesChanged(removed=_blocks(*blocks)))
                model[worker] -= set(blocks)
            case 1 if random.random() < 0.2:
                index.forget(worker)
                model[worker] = set()
            case 2 if random.random() < 0.2:
                index.apply(worker, PrefixesChanged(stored=_blocks(*blocks), is_listing=True))
                model[worker] = set(blocks)
            case _:
                index.apply(worker, PrefixesChanged(stored=_blocks(*blocks)))
                model[worker] |= set(blocks)
        index.audit()
        prompt = random.sample(range(12), 8)
        expected = {}
        for name, held in model.items():
            depth = next((place for place, block in enumerate(prompt) if block not in held), len(prompt))
            if depth:
                expected[name] = depth
        assert index.cached_blocks(_blocks(*prompt)) == expected
        assert index.num_blocks == len(set().union(*model.values()))
