"""ArrivalQueue: order is the key's, whatever the order of adding, and while it is walked."""

import pytest

from scheduler.arrival_queue import ArrivalQueue


def _queue(*keys: int) -> ArrivalQueue[str]:
    queue: ArrivalQueue[str] = ArrivalQueue()
    for key in keys:
        queue.add((0, key), f"r{key}")
    return queue


def test_items_come_in_order_of_their_keys() -> None:
    queue = _queue(3, 1, 2)
    queue.add((-1, 9), "urgent")
    assert list(queue) == ["urgent", "r1", "r2", "r3"]


def test_a_walk_sees_neither_removed_items_nor_any_item_twice() -> None:
    queue = _queue(1, 2, 3, 4)
    seen = []
    for item in queue:
        seen.append(item)
        queue.discard((0, int(item[1:])))
        queue.discard((0, 3))
    assert seen == ["r1", "r2", "r4"]
    assert len(queue) == 0


def test_discarding_what_is_not_there_changes_nothing() -> None:
    queue = _queue(1)
    queue.discard((0, 7))
    assert (0, 1) in queue
    assert (0, 7) not in queue
    assert len(queue) == 1


def test_one_key_holds_one_item() -> None:
    queue = _queue(1)
    with pytest.raises(ValueError, match="in the queue already"):
        queue.add((0, 1), "again")
    assert list(queue) == ["r1"]
