"""`GatedTransport`: bytes move "by themselves", when the test says so, and a cancel takes its time.

Stands for transports whose engine writes without being polled (NIXL): between `cancel` and the answer
CANCELLED it may still be writing. Faults are injected by setting `fail_next` and `raise_in`.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvtransfer.errors import TransferLogicError
from kvtransfer.messages import MemoryDescription, PageCopy, ReadStatus
from kvtransfer.transports.base import ReadId
from kvtransfer.transports.inprocess import InProcessRegistry, InProcessTransport


class GatedTransport:
    """A `Transport` around the in-process one; gates that are open let everything through at once."""

    copies_in_poll = False
    is_moving = False
    needs_serving = False

    def __init__(self, registry: InProcessRegistry, name: str, max_poll_bytes: int = 1 << 20) -> None:
        self._inner = InProcessTransport(registry, name, max_poll_bytes)
        self._cancelling: set[ReadId] = set()
        self._ended: dict[ReadId, ReadStatus] = {}
        self._failed: dict[ReadId, str] = {}
        self.may_finish = True
        self.may_stop = True
        self.fail_next = ""
        self.raise_in: set[str] = set()
        self.active: set[ReadId] = set()

    @property
    def name(self) -> str:
        return self._inner.name

    @property
    def bytes_moved(self) -> int:
        return self._inner.bytes_moved

    def register(self, memory: npt.NDArray[np.uint8]) -> None:
        self._inner.register(memory)

    def describe(self) -> MemoryDescription:
        return self._inner.describe()

    def read(self, source: MemoryDescription, copies: Sequence[PageCopy]) -> ReadId:
        self._maybe_raise("read")
        read_id = self._inner.read(source, copies)
        self.active.add(read_id)
        return read_id

    def move(self) -> None:
        """Write one piece of every read that has not stopped, polled or not."""
        for read_id in self.active - set(self._ended):
            self._move_one(read_id)

    def poll(self, read_id: ReadId) -> ReadStatus:
        self._maybe_raise("poll")
        if read_id not in self.active:
            msg = f"read {read_id} is unknown or has ended"
            raise TransferLogicError(msg)
        if self.fail_next and read_id not in self._ended:
            self._failed = {read_id: self.fail_next}
            self.fail_next = ""
            self._inner.cancel(read_id)
            self._inner.poll(read_id)
            self._ended[read_id] = ReadStatus.FAILED
        gate = self.may_stop if read_id in self._cancelling else self.may_finish
        if read_id not in self._ended and gate:
            if read_id in self._cancelling:
                self._inner.cancel(read_id)
            self._move_one(read_id)
        status = self._ended.pop(read_id, ReadStatus.PENDING)
        if status is not ReadStatus.PENDING:
            self.active.discard(read_id)
            self._cancelling.discard(read_id)
        return status

    def _move_one(self, read_id: ReadId) -> None:
        status = self._inner.poll(read_id)
        if status is not ReadStatus.PENDING:
            self._ended[read_id] = status

    def error(self, read_id: ReadId) -> str:
        return self._failed.get(read_id) or self._inner.error(read_id)

    def serve(self) -> None:
        pass

    def cancel(self, read_id: ReadId) -> None:
        self._maybe_raise("cancel")
        if read_id in self.active:
            self._cancelling.add(read_id)

    def close(self) -> None:
        self.active.clear()
        self._ended.clear()
        self._inner.close()

    def _maybe_raise(self, call: str) -> None:
        if call in self.raise_in:
            msg = f"{call} is broken"
            raise OSError(msg)
