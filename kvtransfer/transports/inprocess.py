"""Reads between objects of one process, through a registry that is passed in: simulation and tests.

Same protocol, same bounded polls and same refusals as the transports between processes.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvtransfer.errors import PeerError, TransferLogicError
from kvtransfer.messages import MemoryDescription, PageCopy, ReadStatus
from kvtransfer.transports.base import ReadId
from kvtransfer.transports.description import attribute
from kvtransfer.transports.local_copy import DEFAULT_MAX_POLL_BYTES, LocalCopy
from kvtransfer.transports.runs import check_memory

_NAME = "inprocess"


class InProcessRegistry:
    """The memories that the transports of one simulated deployment can reach, by name and life."""

    def __init__(self) -> None:
        """Start empty."""
        self._memories: dict[str, tuple[int, npt.NDArray[np.uint8]]] = {}
        self._num_lives = 0

    def publish(self, name: str, memory: npt.NDArray[np.uint8]) -> int:
        """Make `memory` readable; replaces an earlier life of the same name. Returns the life's number."""
        self._num_lives += 1
        self._memories[name] = (self._num_lives, memory)
        return self._num_lives

    def withdraw(self, name: str, life: int) -> None:
        """Take the memory away, as the death of its process does. A later life of the name stays."""
        if self._memories.get(name, (0,))[0] == life:
            del self._memories[name]

    def find(self, name: str, life: int) -> npt.NDArray[np.uint8]:
        """The memory of that life. Raises PeerError when it is gone or replaced."""
        found_life, memory = self._memories.get(name, (None, None))
        if memory is None or found_life != life:
            msg = f"memory {name!r} of life {life} is gone"
            raise PeerError(msg)
        return memory


class InProcessTransport:
    """A `Transport` over an `InProcessRegistry`.

    Args:
        registry: shared by all that shall reach one another.
        name: unique in the registry.
        max_poll_bytes: bytes that one poll copies at most.
    """

    def __init__(self, registry: InProcessRegistry, name: str, max_poll_bytes: int = DEFAULT_MAX_POLL_BYTES) -> None:
        """Start without memory."""
        self._registry = registry
        self._own_name = name
        self._max_poll_bytes = max_poll_bytes
        self._memory: npt.NDArray[np.uint8] | None = None
        self._life = 0
        self._next_id = 0
        self._bytes_moved = 0
        self._reads: dict[ReadId, tuple[str, int, LocalCopy]] = {}
        self._cancelled: set[ReadId] = set()
        self._last_error: tuple[ReadId, str] | None = None

    @property
    def name(self) -> str:
        """As in descriptions."""
        return _NAME

    @property
    def copies_in_poll(self) -> bool:
        """Always: `poll` is where the bytes move."""
        return True

    @property
    def is_moving(self) -> bool:
        """Always: the more polls, the more bytes."""
        return True

    @property
    def needs_serving(self) -> bool:
        """Never: readers reach the memory itself."""
        return False

    @property
    def bytes_moved(self) -> int:
        """Bytes that our reads have copied so far."""
        return self._bytes_moved

    def register(self, memory: npt.NDArray[np.uint8]) -> None:
        """Make `memory` readable by all of the registry and writable by our reads. Once."""
        if self._memory is not None:
            msg = f"{self._own_name} registered its memory already"
            raise TransferLogicError(msg)
        check_memory(memory)
        self._memory = memory
        self._life = self._registry.publish(self._own_name, memory)

    def describe(self) -> MemoryDescription:
        """Our name and life in the registry."""
        self._registered()
        return MemoryDescription(_NAME, {"name": self._own_name, "life": self._life})

    def read(self, source: MemoryDescription, copies: Sequence[PageCopy]) -> ReadId:
        """Start a read. Raises PeerError before any byte moves."""
        own = self._registered()
        name, life = _address(source)
        local_copy = LocalCopy(self._registry.find(name, life), own, copies)
        self._next_id += 1
        read_id = ReadId(self._next_id)
        self._reads[read_id] = (name, life, local_copy)
        return read_id

    def poll(self, read_id: ReadId) -> ReadStatus:
        """Copy up to `max_poll_bytes` and report."""
        if read_id not in self._reads:
            msg = f"read {read_id} is unknown or has ended"
            raise TransferLogicError(msg)
        name, life, local_copy = self._reads[read_id]
        if read_id in self._cancelled:
            self._forget(read_id)
            return ReadStatus.CANCELLED
        try:
            self._registry.find(name, life)
        except PeerError as error:
            self._forget(read_id)
            self._last_error = (read_id, str(error))
            return ReadStatus.FAILED
        is_done = local_copy.advance(self._max_poll_bytes)
        self._bytes_moved += local_copy.take_count()
        if not is_done:
            return ReadStatus.PENDING
        self._forget(read_id)
        return ReadStatus.DONE

    def error(self, read_id: ReadId) -> str:
        """Why the last read that failed did, if it was `read_id`."""
        return self._last_error[1] if self._last_error and self._last_error[0] == read_id else ""

    def serve(self) -> None:
        """Nothing to do."""

    def cancel(self, read_id: ReadId) -> None:
        """Stop a read; an ended one is left alone."""
        if read_id in self._reads:
            self._cancelled.add(read_id)

    def close(self) -> None:
        """Withdraw our memory and forget all reads; may be called twice."""
        self._registry.withdraw(self._own_name, self._life)
        self._reads.clear()
        self._cancelled.clear()

    def _registered(self) -> npt.NDArray[np.uint8]:
        if self._memory is None:
            msg = f"{self._own_name} has not registered its memory"
            raise TransferLogicError(msg)
        return self._memory

    def _forget(self, read_id: ReadId) -> None:
        del self._reads[read_id]
        self._cancelled.discard(read_id)


def _address(source: MemoryDescription) -> tuple[str, int]:
    return attribute(source, _NAME, "name", str), attribute(source, _NAME, "life", int)
