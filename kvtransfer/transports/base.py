"""The transport protocol: the receiver reads; nobody writes into another process's memory (M7).

Every implementation passes `tests/contract/test_transport_contract.py`.
"""

from collections.abc import Sequence
from typing import NewType, Protocol

import numpy as np
import numpy.typing as npt

from kvtransfer.messages import MemoryDescription, PageCopy, ReadStatus

ReadId = NewType("ReadId", int)


class Transport(Protocol):
    """Moves runs of bytes from a peer's registered memory into our own.

    Called from the agent thread only. No call blocks longer than one run of bytes takes to copy.
    """

    @property
    def name(self) -> str:
        """As in `TransferConfig.transport`."""
        ...

    @property
    def copies_in_poll(self) -> bool:
        """Whether bytes are written into our memory inside `poll` only.

        Then an exception out of `poll` proves that nothing is being written. Else bytes move on their own and
        only `poll`'s answer says that they have stopped.
        """
        ...

    @property
    def is_moving(self) -> bool:
        """Whether polling again at once would move more bytes; else the agent sleeps between two polls."""
        ...

    @property
    def needs_serving(self) -> bool:
        """Whether peers' reads of our memory proceed only while `serve` is called again and again."""
        ...

    @property
    def bytes_moved(self) -> int:
        """Bytes that reads have written into our memory so far, counted where they move (I14)."""
        ...

    def register(self, memory: npt.NDArray[np.uint8]) -> None:
        """Make `memory` (1-D, our whole pool) readable by peers and writable by our reads. Once."""
        ...

    def describe(self) -> MemoryDescription:
        """What a peer needs to read our memory. Raises TransferLogicError before `register`."""
        ...

    def read(self, source: MemoryDescription, copies: Sequence[PageCopy]) -> ReadId:
        """Start a read. Offsets outside either memory raise PeerError before any byte moves."""
        ...

    def poll(self, read_id: ReadId) -> ReadStatus:
        """Advance and report. After a status other than PENDING the id is forgotten."""
        ...

    def error(self, read_id: ReadId) -> str:
        """Why the last FAILED poll of `read_id` failed; empty when unknown."""
        ...

    def serve(self) -> None:
        """Do what peers' reads need of this side; returns at once. A no-op unless `needs_serving`."""
        ...

    def cancel(self, read_id: ReadId) -> None:
        """Ask a read to stop; `poll` then answers CANCELLED (or DONE) once nothing is written any more."""
        ...

    def close(self) -> None:
        """Release everything; may be called twice."""
        ...
