"""`ArrivalQueue`: requests that wait for a worker, in the order in which they must be served.

A request that comes back (deferred, retried) takes its old place again: order is a property of the
request, not of the moment it was added.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from typing import Generic, TypeVar

ArrivalKey = tuple[int, int]
"""(arrival number less the head start of a priority, arrival number): smaller is served first."""

Item = TypeVar("Item")


class ArrivalQueue(Generic[Item]):
    """A sorted queue with removal from the middle; O(n) moves of small tuples, n bounded by admission."""

    def __init__(self) -> None:
        """Empty."""
        self._keys: list[ArrivalKey] = []
        self._items: dict[ArrivalKey, Item] = {}

    def add(self, key: ArrivalKey, item: Item) -> None:
        """Put `item` at its place. Raises ValueError when the key is taken."""
        if key in self._items:
            msg = f"arrival key {key} is in the queue already"
            raise ValueError(msg)
        insort(self._keys, key)
        self._items[key] = item

    def discard(self, key: ArrivalKey) -> None:
        """Take an item out; nothing happens when it is not there."""
        if self._items.pop(key, None) is not None:
            del self._keys[bisect_left(self._keys, key)]

    def __iter__(self) -> Iterator[Item]:
        """First to serve first, lazily; the queue may be changed while this runs."""
        position = 0
        while position < len(self._keys):
            key = self._keys[position]
            yield self._items[key]
            position = bisect_right(self._keys, key)

    def __len__(self) -> int:
        """Items that wait."""
        return len(self._keys)

    def __contains__(self, key: object) -> bool:
        """Whether the item with this key waits here."""
        return key in self._items
