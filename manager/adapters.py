"""`AdapterPool`: which LoRA adapters are resident, and for whom.

An adapter is *pinned* while an active cache runs with it, and *resident* while it has pages. Only pins decide what is
available: an unpinned adapter stays resident until its pages are needed, so a plan never has to say whom it evicts.
That is settled at publish: what is pinned and not resident gets pages, from the free ones and from the adapters
unpinned longest ago. So taking a pin back is all that a revert has to do.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from manager.errors import CacheConfigError, LogicError
from manager.ids import AdapterId
from manager.storage.journal import Journal


@dataclass(frozen=True, slots=True)
class AdapterSizes:
    """What a deployment's adapters need.

    Attributes:
        num_pages: pages of the pool.
        pages: of each adapter that may be asked for.
    """

    num_pages: int = 0
    pages: Mapping[AdapterId, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse an adapter that could never run."""
        for adapter_id, pages in self.pages.items():
            if not 0 < pages <= self.num_pages:
                msg = f"adapter {adapter_id} needs {pages} pages, the pool has {self.num_pages}"
                raise CacheConfigError(msg)


@dataclass(frozen=True, slots=True)
class AdapterLoad:
    """An adapter that a committed plan made resident: its weights go into these pages before the next step."""

    adapter_id: AdapterId
    pages: tuple[int, ...]


class AdapterPool:
    """Pages of adapters.

    Attributes:
        pins: active caches per adapter; adapters without any are absent.
        resident: pages of each adapter that has some, in the order in which they were last unpinned.
        free: pages of nobody; the next one to be taken is last.
        available: pages that pinned adapters leave.
    """

    __slots__ = ("_journal", "_loads", "_sizes", "available", "free", "pins", "resident")

    def __init__(self, sizes: AdapterSizes, journal: Journal) -> None:
        """Nothing is resident."""
        self._sizes = sizes
        self._journal = journal
        self._loads: list[AdapterLoad] = []
        self.pins: dict[AdapterId, int] = {}
        self.resident: dict[AdapterId, tuple[int, ...]] = {}
        self.free = list(range(sizes.num_pages - 1, -1, -1))
        self.available = sizes.num_pages

    @property
    def num_pages(self) -> int:
        """Pages in all."""
        return self._sizes.num_pages

    def size_of(self, adapter_id: AdapterId) -> int:
        """Pages of an adapter. Raises LogicError for one that the deployment does not have."""
        pages = self._sizes.pages.get(adapter_id)
        if pages is None:
            msg = f"adapter {adapter_id} is not among the {len(self._sizes.pages)} of this deployment"
            raise LogicError(msg)
        return pages

    def cost(self, adapter_id: AdapterId | None) -> int:
        """Pages that a pin would take from `available`."""
        return 0 if adapter_id is None or adapter_id in self.pins else self.size_of(adapter_id)

    def pin(self, adapter_id: AdapterId | None) -> int:
        """An active cache runs with it; returns what that took. The caller has compared `cost` with `available`."""
        if adapter_id is None:
            return 0
        cost = self.cost(adapter_id)
        self._set_pins(adapter_id, self.pins.get(adapter_id, 0) + 1)
        self._take(cost)
        return cost

    def unpin(self, adapter_id: AdapterId | None, *, as_if_never: bool = False) -> None:
        """One active cache less; `as_if_never` leaves its place in the order of eviction, for a revert."""
        if adapter_id is None:
            return
        count = self.pins[adapter_id] - 1
        self._set_pins(adapter_id, count)
        if count:
            return
        self._take(-self.size_of(adapter_id))
        if not as_if_never and adapter_id in self.resident:
            self._set_resident({**_without(self.resident, adapter_id), adapter_id: self.resident[adapter_id]})

    def publish(self) -> None:
        """Give pages to what is pinned and has none."""
        for adapter_id in self.pins:
            if adapter_id not in self.resident:
                self._load(adapter_id)

    def take_loads(self) -> tuple[AdapterLoad, ...]:
        """Adapters made resident since the last call, in order; a page loaded twice holds the later one."""
        loads = tuple(self._loads)
        self._loads.clear()
        return loads

    def pages_of(self, adapter_id: AdapterId) -> tuple[int, ...]:
        """Where a resident adapter is. Raises LogicError when it is not."""
        if adapter_id not in self.resident:
            msg = f"adapter {adapter_id} is not resident"
            raise LogicError(msg)
        return self.resident[adapter_id]

    def owners(self) -> Iterator[tuple[AdapterId, tuple[int, ...]]]:
        """Resident adapters, next to be evicted first; pinned ones among them are passed over."""
        yield from self.resident.items()

    def _load(self, adapter_id: AdapterId) -> None:
        size, resident, freed = self.size_of(adapter_id), dict(self.resident), list(self.free)
        for other in self.resident:
            if len(freed) >= size:
                break
            if other not in self.pins:
                freed += resident.pop(other)[::-1]
        pages = tuple(freed[: -size - 1 : -1])
        resident[adapter_id] = pages
        load = AdapterLoad(adapter_id, pages)
        self._journal.push((self._unload, (load, list(self.free))))
        self.free[:] = freed[:-size]
        self._loads.append(load)
        self._set_resident(resident)

    def _set_pins(self, adapter_id: AdapterId, count: int) -> None:
        self._journal.push((self._put_pins, (adapter_id, self.pins.get(adapter_id, 0))))
        self._put_pins(adapter_id, count)

    def _put_pins(self, adapter_id: AdapterId, count: int) -> None:
        if count:
            self.pins[adapter_id] = count
        else:
            self.pins.pop(adapter_id, None)

    def _take(self, count: int) -> None:
        self._journal.push((self._put_available, (self.available,)))
        self.available -= count

    def _put_available(self, available: int) -> None:
        self.available = available

    def _set_resident(self, resident: dict[AdapterId, tuple[int, ...]]) -> None:
        self._journal.push((self._put_resident, (self.resident,)))
        self.resident = resident

    def _put_resident(self, resident: dict[AdapterId, tuple[int, ...]]) -> None:
        self.resident = resident

    def _unload(self, load: AdapterLoad, free: list[int]) -> None:
        self._loads.remove(load)
        self.free[:] = free


def _without(resident: Mapping[AdapterId, tuple[int, ...]], adapter_id: AdapterId) -> dict[AdapterId, tuple[int, ...]]:
    return {other: pages for other, pages in resident.items() if other != adapter_id}
