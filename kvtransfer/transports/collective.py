"""Reads over torch.distributed's gloo: for hosts that share neither memory nor NIXL.

torch.distributed is two-sided: the owner's thread sends what a reader asks for (`collective_link`). The bytes arrive
in buffers of the fetch and enter our memory in `poll` only (`staged`), so that this transport keeps the pull rule.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvtransfer.errors import TransferLogicError
from kvtransfer.messages import MemoryDescription
from kvtransfer.transports.collective_link import LinkAddress, LinkFetch, OwnerDoor, ReaderLink
from kvtransfer.transports.description import attribute
from kvtransfer.transports.runs import Run
from kvtransfer.transports.staged import MAX_BATCH_BYTES, StagedTransport

_NAME = "collective"
_TIMEOUT_S = 10.0


class CollectiveTransport(StagedTransport):
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
        super().__init__(_NAME, max_batch_bytes)
        self._life_name = life_name
        self._host = host
        self._timeout_s = timeout_s
        self._links: dict[LinkAddress, ReaderLink] = {}
        self._door: OwnerDoor | None = None
        self._description: MemoryDescription | None = None

    def register(self, memory: npt.NDArray[np.uint8]) -> None:
        """Make `memory` readable by whoever connects, and writable by our reads. Once."""
        super().register(memory)
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

    def serve(self) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """End all links; may be called twice."""
        for link in self._links.values():
            link.close()
        self._links.clear()
        if self._door is not None:
            self._door.close()
        super().close()

    def _size_of(self, source: MemoryDescription) -> int:
        return attribute(source, _NAME, "num_bytes", int)

    def _fetch(self, source: MemoryDescription, runs: Sequence[Run]) -> LinkFetch:
        address = LinkAddress(
            attribute(source, _NAME, "host", str),
            attribute(source, _NAME, "port", int),
            attribute(source, _NAME, "life", str),
        )
        link = self._links.get(address)
        if link is None or link.is_broken:
            # Those of dead owners go when anything new is connected: their number is bounded by the living.
            self._links = {place: other for place, other in self._links.items() if not other.is_broken}
            link = self._links[address] = ReaderLink(address, self._host, self._timeout_s)
        return link.fetch(runs)
