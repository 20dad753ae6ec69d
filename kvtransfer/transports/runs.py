"""Runs of bytes as the transports take them: checked against both memories, and cut into bounded batches. Pure."""

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from kvtransfer.errors import PeerError, TransferLogicError
from kvtransfer.messages import PageCopy

Run = tuple[int, int, int]
"""Offset in the source, offset in our memory, number of bytes."""


def check_memory(memory: npt.NDArray[np.uint8]) -> None:
    """Refuse anything but writable 1-D contiguous bytes, which offsets could not address.

    Raises:
        TransferLogicError: it is something else.
    """
    if memory.dtype != np.uint8 or memory.ndim != 1 or not memory.flags.c_contiguous or not memory.flags.writeable:
        msg = f"a registered memory is 1-D writable contiguous uint8, got {memory.ndim}-D {memory.dtype}"
        raise TransferLogicError(msg)


def checked_runs(copies: Sequence[PageCopy], source_bytes: int, own_bytes: int) -> list[Run]:
    """The copies as tuples.

    Args:
        copies: what shall be read.
        source_bytes: size of the peer's memory.
        own_bytes: size of ours.

    Raises:
        PeerError: a run leaves either memory.
    """
    runs: list[Run] = []
    for copy in copies:
        source_offset, destination_offset, num_bytes = copy.source_offset, copy.destination_offset, copy.num_bytes
        # One comparison chain a run, no call: a long context on a cold cache has thousands.
        if not (
            0 <= source_offset <= source_offset + num_bytes <= source_bytes
            and 0 <= destination_offset <= destination_offset + num_bytes <= own_bytes
        ):
            msg = f"{copy} leaves the source memory of {source_bytes} or our own of {own_bytes} bytes"
            raise PeerError(msg)
        runs.append((source_offset, destination_offset, num_bytes))
    return runs


def batches_of(runs: Sequence[Run], max_bytes: int, max_runs: int) -> Iterator[list[Run]]:
    """Cut runs into batches of at most `max_bytes` and `max_runs`, in order; a longer run is cut into pieces."""
    batch: list[Run] = []
    left = max_bytes
    for source, destination, num_bytes in runs:
        done = 0
        while done < num_bytes:
            length = min(num_bytes - done, left)
            batch.append((source + done, destination + done, length))
            done += length
            left -= length
            if not left or len(batch) == max_runs:
                yield batch
                batch, left = [], max_bytes
    if batch:
        yield batch
