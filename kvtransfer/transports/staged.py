"""`StagedTransport`: reads whose bytes arrive in buffers of their own and are copied into our memory by `poll`.

For transports that cannot write into our memory one-sidedly, or must not: a two-sided peer that is slow, stopped or
believed dead may send at any time, and an epoch does not fence it. Here whatever comes late lands in a buffer
that belongs to its fetch, never in a page that is another's by now. So such a transport keeps the pull rule of
M7 (an owner reuses pages of an expired lease at once, a cancel is done at once), and nobody has to be ended first.

    batches of runs ──fetch──► [buffer] [buffer]  ──poll──► our memory
                               at most NUM_AHEAD on their way
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvtransfer.errors import PeerError, TransferLogicError
from kvtransfer.messages import MemoryDescription, PageCopy, ReadStatus
from kvtransfer.transports.base import ReadId
from kvtransfer.transports.runs import Run, batches_of, check_memory, checked_runs

NUM_AHEAD = 2
"""Fetches on their way for one read: one travels while the other is copied."""
MAX_BATCH_BYTES = 8 << 20
MAX_BATCH_RUNS = 256


class Fetch(Protocol):
    """The bytes of one batch, on their way."""

    @property
    def is_ready(self) -> bool:
        """Whether `take` answers, or raises, at once."""
        ...

    def take(self) -> npt.NDArray[np.uint8] | None:
        """The bytes of all runs one after another, or None while they travel. Raises PeerError."""
        ...

    def release(self) -> None:
        """Nobody will take them, or they have been taken. Called once."""
        ...


@dataclass(slots=True)
class _Read:
    source: MemoryDescription
    batches: Iterator[list[Run]]
    fetches: deque[tuple[list[Run], Fetch]] = field(default_factory=deque)
    is_cancelled: bool = False


class StagedTransport(ABC):
    """A `Transport` that fetches: all of it but how an owner is described and asked.

    Attributes:
        bytes_moved: bytes that our reads have copied so far.
    """

    def __init__(self, name: str, max_batch_bytes: int) -> None:
        """Start without memory and reads.

        Args:
            name: as in `TransferConfig.transport`.
            max_batch_bytes: bytes of one fetch at most.
        """
        self._name = name
        self._max_batch_bytes = max_batch_bytes
        self._memory: npt.NDArray[np.uint8] | None = None
        self._reads: dict[ReadId, _Read] = {}
        self._next_id = 0
        self._last_error: tuple[ReadId, str] | None = None
        self.bytes_moved = 0

    @abstractmethod
    def describe(self) -> MemoryDescription:
        """How peers reach our memory."""

    @abstractmethod
    def _size_of(self, source: MemoryDescription) -> int:
        """Bytes of a peer's memory. Raises PeerError for a bad description."""

    @abstractmethod
    def _fetch(self, source: MemoryDescription, runs: Sequence[Run]) -> Fetch:
        """Ask the owner for the bytes of some runs; returns at once. Raises PeerError."""

    @property
    def name(self) -> str:
        """As in `TransferConfig.transport`."""
        return self._name

    @property
    def copies_in_poll(self) -> bool:
        """Always: what arrives waits in a buffer."""
        return True

    @property
    def needs_serving(self) -> bool:
        """Never: owners have threads that answer."""
        return False

    @property
    def memory(self) -> npt.NDArray[np.uint8]:
        """Ours. Raises TransferLogicError before `register`."""
        if self._memory is None:
            msg = "no memory is registered"
            raise TransferLogicError(msg)
        return self._memory

    def register(self, memory: npt.NDArray[np.uint8]) -> None:
        """Make `memory` readable by peers, and writable by our reads. Once."""
        if self._memory is not None:
            msg = "a memory is registered already"
            raise TransferLogicError(msg)
        check_memory(memory)
        self._memory = memory

    @property
    def is_moving(self) -> bool:
        """Whether a poll would copy something now."""
        return any(read.fetches and read.fetches[0][1].is_ready for read in self._reads.values())

    def read(self, source: MemoryDescription, copies: Sequence[PageCopy]) -> ReadId:
        """Begin; the first poll asks, and says whether the owner lives.

        Raises:
            PeerError: a bad description, or a run outside either memory.
        """
        runs = checked_runs(copies, self._size_of(source), self.memory.size)
        self._next_id += 1
        read_id = ReadId(self._next_id)
        self._reads[read_id] = _Read(source, batches_of(runs, self._max_batch_bytes, MAX_BATCH_RUNS))
        return read_id

    def poll(self, read_id: ReadId) -> ReadStatus:
        """Copy the batch that is here, if one is, and ask for more."""
        read = self._reads.get(read_id)
        if read is None:
            msg = f"read {read_id} is unknown or has ended"
            raise TransferLogicError(msg)
        if read.is_cancelled:
            return self._end(read_id, read, ReadStatus.CANCELLED)
        try:
            self._take_one(read)
            self._ask_ahead(read)
        except PeerError as error:
            self._last_error = (read_id, str(error))
            return self._end(read_id, read, ReadStatus.FAILED)
        return ReadStatus.PENDING if read.fetches else self._end(read_id, read, ReadStatus.DONE)

    def error(self, read_id: ReadId) -> str:
        """Why the last read that failed did, if it was `read_id`."""
        return self._last_error[1] if self._last_error and self._last_error[0] == read_id else ""

    def cancel(self, read_id: ReadId) -> None:
        """The next poll says CANCELLED; an ended read is left alone."""
        read = self._reads.get(read_id)
        if read is not None:
            read.is_cancelled = True

    def close(self) -> None:
        """Forget all reads; may be called twice."""
        for read in self._reads.values():
            _release(read)
        self._reads.clear()

    def _take_one(self, read: _Read) -> None:
        if not read.fetches:
            return
        runs, fetch = read.fetches[0]
        received = fetch.take()
        if received is None:
            return
        first = 0
        for _, destination, num_bytes in runs:
            self.memory[destination : destination + num_bytes] = received[first : first + num_bytes]
            first += num_bytes
        self.bytes_moved += first
        read.fetches.popleft()
        fetch.release()

    def _ask_ahead(self, read: _Read) -> None:
        while len(read.fetches) < NUM_AHEAD:
            batch = next(read.batches, None)
            if batch is None:
                return
            read.fetches.append((batch, self._fetch(read.source, batch)))

    def _end(self, read_id: ReadId, read: _Read, status: ReadStatus) -> ReadStatus:
        _release(read)
        del self._reads[read_id]
        return status


def _release(read: _Read) -> None:
    for _, fetch in read.fetches:
        fetch.release()
    read.fetches.clear()


def gather(memory: npt.NDArray[np.uint8], runs: Sequence[tuple[int, int]]) -> npt.NDArray[np.uint8]:
    """The owner's side of a fetch: the bytes of (offset, length) runs, one after another.

    Raises:
        PeerError: a run leaves the memory: the peer is wrong.
    """
    for offset, num_bytes in runs:
        if not 0 <= offset <= offset + num_bytes <= memory.size:
            msg = f"a peer asks for {num_bytes} bytes at {offset} of a memory of {memory.size}"
            raise PeerError(msg)
    if not runs:
        return np.empty(0, dtype=np.uint8)
    return np.concatenate([memory[offset : offset + num_bytes] for offset, num_bytes in runs])
