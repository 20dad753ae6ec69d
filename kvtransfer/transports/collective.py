"""Reads over torch.distributed's gloo: for hosts that share neither memory nor NIXL.

torch.distributed is two-sided: the owner's thread sends what a reader asks for (`collective_link`). The bytes arrive
in buffers of the fetch and enter our memory in `poll` only (`staged`), so that this transport keeps the pull rule.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvtransfer.errors import PeerError, TransferLogicError
from kvtransfer.messages import MemoryDescription, PageCopy, ReadStatus
from kvtransfer.transports.base import ReadId
from kvtransfer.transports.collective_link import LinkAddress, LinkFetch, OwnerDoor, ReaderLink
from kvtransfer.transports.runs import Run
from kvtransfer.transports.staged import MAX_BATCH_BYTES, StagedReads

_NAME = "collective"
_TIMEOUT_S = 10.0


class CollectiveTransport:
    """A `Transport` over links of two.

    Args:
        life_name: unique among the peers and over lives.
        host: address of ours that peers can connect to.
        max_batch_bytes: bytes that one poll copies at most.
        timeout_s: silence after which a link counts as broken.
    """

    def __init__(
        self,
        life_name: str,
        host: str = "127.0.0.1",
        max_batch_bytes: int = MAX_BATCH_BYTES,
        timeout_s: float = _TIMEOUT_S,
    ) -> None:
        """Start without memory; nobody listens yet."""
        self._life_name = life_name
        self._host = host
        self._timeout_s = timeout_s
        self._reads = StagedReads(self._fetch, max_batch_bytes)
        self._links: dict[LinkAddress, ReaderLink] = {}
        self._door: OwnerDoor | None = None
        self._description: MemoryDescription | None = None

    @property
    def name(self) -> str:
        """As in `TransferConfig.transport`."""
        return _NAME

    @property
    def copies_in_poll(self) -> bool:
        """Always: what arrives waits in a buffer."""
        return True

    @property
    def is_moving(self) -> bool:
        """Whether something has arrived."""
        return self._reads.is_moving

    @property
    def needs_serving(self) -> bool:
        """Never: links have threads."""
        return False

    @property
    def bytes_moved(self) -> int:
        """Bytes that our reads have copied so far."""
        return self._reads.bytes_moved

    def register(self, memory: npt.NDArray[np.uint8]) -> None:
        """Make `memory` readable by whoever connects, and writable by our reads. Once."""
        self._reads.register(memory)
        self._door = OwnerDoor(self._life_name, self._host, memory, self._timeout_s)
        address = self._door.address
        self._description = MemoryDescription(
            _NAME, {"host": address.host, "port": address.port, "life": address.name, "num_bytes": memory.size}
        )

    def describe(self) -> MemoryDescription:
        """Where we listen."""
        if self._description is None:
            msg = f"{self._life_name} has no registered memory"
            raise TransferLogicError(msg)
        return self._description

    def read(self, source: MemoryDescription, copies: Sequence[PageCopy]) -> ReadId:
        """Start a read. Raises PeerError for a bad description or run; whether the owner lives, `poll` says."""
        _, num_bytes = _parse(source)
        return self._reads.start(source, num_bytes, copies)

    def poll(self, read_id: ReadId) -> ReadStatus:
        """Copy what has arrived and ask for more."""
        return self._reads.poll(read_id)

    def error(self, read_id: ReadId) -> str:
        """Why the last read that failed did, if it was `read_id`."""
        return self._reads.error(read_id)

    def serve(self) -> None:
        """Nothing to do."""

    def cancel(self, read_id: ReadId) -> None:
        """Stop a read; what is on its way is thrown away."""
        self._reads.cancel(read_id)

    def close(self) -> None:
        """End all links; may be called twice."""
        for link in self._links.values():
            link.close()
        self._links.clear()
        if self._door is not None:
            self._door.close()
        self._reads.clear()

    def _fetch(self, source: MemoryDescription, runs: Sequence[Run]) -> LinkFetch:
        address, _ = _parse(source)
        link = self._links.get(address)
        if link is None or link.is_broken:
            # Those of dead owners go when anything new is connected: their number is bounded by the living.
            self._links = {place: other for place, other in self._links.items() if not other.is_broken}
            link = self._links[address] = ReaderLink(address, self._host, self._timeout_s)
        return link.fetch(runs)


def _parse(source: MemoryDescription) -> tuple[LinkAddress, int]:
    attributes = source.attributes
    host, port = attributes.get("host"), attributes.get("port")
    life, num_bytes = attributes.get("life"), attributes.get("num_bytes")
    if (
        source.transport != _NAME
        or not isinstance(host, str)
        or not isinstance(port, int)
        or not isinstance(life, str)
        or not isinstance(num_bytes, int)
    ):
        msg = f"not a description of the {_NAME} transport: {source.transport}"
        raise PeerError(msg)
    return LinkAddress(host, port, life), num_bytes
