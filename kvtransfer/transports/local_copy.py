"""`LocalCopy`: a read between two memories of this process, in bounded pieces. Shared by the local transports.

Between two calls of `advance` nothing is being written, so that a cancel takes effect at once.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvtransfer.errors import PeerError, TransferLogicError
from kvtransfer.messages import PageCopy

DEFAULT_MAX_POLL_BYTES = 8 << 20
"""Bytes that one poll copies at most: under 1 ms at memcpy's speed, and too much for the overhead to show."""


class LocalCopy:
    """A resumable copy of runs of bytes.

    Args:
        source: the peer's memory, [num_bytes] uint8.
        destination: our memory, [num_bytes] uint8, writable.
        copies: the runs, in order.

    Raises:
        PeerError: a run leaves either memory; no byte has moved.
    """

    def __init__(
        self, source: npt.NDArray[np.uint8], destination: npt.NDArray[np.uint8], copies: Sequence[PageCopy]
    ) -> None:
        """Check every run before the first byte moves."""
        for copy in copies:
            _check_run("source", copy.source_offset, copy.num_bytes, source.size)
            _check_run("destination", copy.destination_offset, copy.num_bytes, destination.size)
        self._source = source
        self._destination = destination
        self._copies = tuple(copies)
        self._run = 0
        self._offset = 0

    def advance(self, max_bytes: int) -> bool:
        """Copy up to `max_bytes` more bytes; whether all of them are here."""
        left = max_bytes
        while self._run < len(self._copies):
            copy = self._copies[self._run]
            length = min(copy.num_bytes - self._offset, left)
            source = copy.source_offset + self._offset
            destination = copy.destination_offset + self._offset
            self._destination[destination : destination + length] = self._source[source : source + length]
            left -= length
            self._offset += length
            if self._offset < copy.num_bytes:
                return False
            self._run, self._offset = self._run + 1, 0
            if not left:
                break
        return self._run == len(self._copies)


def check_memory(memory: npt.NDArray[np.uint8]) -> None:
    """Refuse anything but writable 1-D contiguous bytes, which offsets could not address.

    Raises:
        TransferLogicError: it is something else.
    """
    if memory.dtype != np.uint8 or memory.ndim != 1 or not memory.flags.c_contiguous or not memory.flags.writeable:
        msg = f"a registered memory is 1-D writable contiguous uint8, got {memory.ndim}-D {memory.dtype}"
        raise TransferLogicError(msg)


def _check_run(side: str, offset: int, num_bytes: int, limit_bytes: int) -> None:
    if offset < 0 or num_bytes < 0 or offset + num_bytes > limit_bytes:
        msg = f"the run [{offset}, {offset + num_bytes}) leaves the {side} memory of {limit_bytes} bytes"
        raise PeerError(msg)
