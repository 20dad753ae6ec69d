"""`LocalCopy`: a read between two memories of this process, in bounded pieces. Shared by the local transports.

Between two calls of `advance` nothing is being written, so that a cancel takes effect at once.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvtransfer.messages import PageCopy
from kvtransfer.transports.runs import checked_runs

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
        runs = checked_runs(copies, source.size, destination.size)
        self._source = source
        self._destination = destination
        self._runs = runs
        self._run = 0
        self._offset = 0
        self._num_bytes = 0

    def take_count(self) -> int:
        """Bytes copied since the last call."""
        num_bytes, self._num_bytes = self._num_bytes, 0
        return num_bytes

    def advance(self, max_bytes: int) -> bool:
        """Copy up to `max_bytes` more bytes; whether all of them are here."""
        source, destination = self._source, self._destination
        left = max_bytes
        for index in range(self._run, len(self._runs)):
            source_first, destination_first, length = self._runs[index]
            if self._offset or length > left:
                left = self._copy_part(index, left)
                if self._offset:
                    self._num_bytes += max_bytes - left
                    return False
            else:
                destination[destination_first : destination_first + length] = source[
                    source_first : source_first + length
                ]
                left -= length
            self._run = index + 1
            if not left:
                break
        self._num_bytes += max_bytes - left
        return self._run == len(self._runs)

    def _copy_part(self, index: int, max_bytes: int) -> int:
        """Go on in a run that does not fit into one poll; `_offset` is 0 afterwards if it is complete."""
        source_first, destination_first, num_bytes = self._runs[index]
        length = min(num_bytes - self._offset, max_bytes)
        source_first, destination_first = source_first + self._offset, destination_first + self._offset
        self._destination[destination_first : destination_first + length] = self._source[
            source_first : source_first + length
        ]
        self._offset += length
        if self._offset == num_bytes:
            self._offset = 0
        return max_bytes - length
