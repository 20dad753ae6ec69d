"""Pages held without a cache: leases for a remote reader, and slots that a remote read may still write to.

Pure tables. Deadlines are the holder's business; nothing here expires by itself.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from manager.errors import LogicError
from manager.ids import LeaseId, RequestId
from manager.storage.journal import Journal


@dataclass(frozen=True, slots=True)
class HeldPages:
    """Locked pages of one holder.

    Attributes:
        request_id: whose pages they were.
        priority: of that request, for the day they are released.
        pages: per layer group.
    """

    request_id: RequestId
    priority: int
    pages: tuple[tuple[int, ...], ...]


class LeaseTable:
    """Leases by id. Ids are never used twice, not even after a rollback: a peer may know them."""

    __slots__ = ("_journal", "_leases", "_next", "_num_leases_of")

    def __init__(self, journal: Journal) -> None:
        """No lease yet."""
        self._journal = journal
        self._leases: dict[LeaseId, HeldPages] = {}
        self._num_leases_of: dict[int, int] = {}
        self._next = 1

    def add(self, held: HeldPages) -> LeaseId:
        """Note a lease whose pages are locked already."""
        lease_id = LeaseId(self._next)
        self._next += 1
        self._insert(lease_id, held)
        self._journal.push((self._discard, (lease_id,)))
        return lease_id

    def remove(self, lease_id: LeaseId) -> HeldPages:
        """Forget a lease; the caller releases its pages.

        Raises:
            LogicError: no such lease.
        """
        if lease_id not in self._leases:
            msg = f"no lease {lease_id}; it never existed or has ended"
            raise LogicError(msg)
        held = self._remove(lease_id)
        self._journal.push((self._insert, (lease_id, held)))
        return held

    @property
    def num_pages(self) -> int:
        """Different pages under at least one lease."""
        return len(self._num_leases_of)

    def items(self) -> Iterator[tuple[LeaseId, HeldPages]]:
        """Every lease, by id."""
        yield from sorted(self._leases.items())

    def values(self) -> Iterator[HeldPages]:
        """What every lease holds."""
        yield from self._leases.values()

    def _discard(self, lease_id: LeaseId) -> None:
        self._remove(lease_id)

    def _insert(self, lease_id: LeaseId, held: HeldPages) -> None:
        self._leases[lease_id] = held
        for pages in held.pages:
            for page in pages:
                self._num_leases_of[page] = self._num_leases_of.get(page, 0) + 1

    def _remove(self, lease_id: LeaseId) -> HeldPages:
        held = self._leases.pop(lease_id)
        for pages in held.pages:
            for page in pages:
                count = self._num_leases_of[page] - 1
                if count:
                    self._num_leases_of[page] = count
                else:
                    del self._num_leases_of[page]
        return held


class QuarantineTable:
    """Slots that nobody may use until the reads into them are known to have ended."""

    __slots__ = ("_by_request", "_journal")

    def __init__(self, journal: Journal) -> None:
        """Empty."""
        self._journal = journal
        self._by_request: dict[RequestId, HeldPages] = {}

    def add(self, held: HeldPages) -> None:
        """Note quarantined pages.

        Raises:
            LogicError: the request has some already.
        """
        if held.request_id in self._by_request:
            msg = f"{held.request_id} has quarantined pages already"
            raise LogicError(msg)
        self._by_request[held.request_id] = held
        self._journal.push((self._discard, (held.request_id,)))

    def remove(self, request_id: RequestId) -> HeldPages:
        """Forget a request's quarantined pages; the caller frees them.

        Raises:
            LogicError: it has none.
        """
        if request_id not in self._by_request:
            msg = f"{request_id} has no quarantined pages"
            raise LogicError(msg)
        held = self._by_request.pop(request_id)
        self._journal.push((self._by_request.__setitem__, (request_id, held)))
        return held

    @property
    def num_pages(self) -> int:
        """Quarantined pages."""
        return sum(len(pages) for held in self._by_request.values() for pages in held.pages)

    def by_request(self) -> Mapping[RequestId, HeldPages]:
        """Every entry."""
        return self._by_request

    def _discard(self, request_id: RequestId) -> None:
        del self._by_request[request_id]
