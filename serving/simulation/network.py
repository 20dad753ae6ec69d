"""Bytes and settles between simulated workers, in virtual time.

`VirtualTransport` is a `Transport` whose reads last as long as their bytes need at the receiver's bandwidth;
`VirtualPeers` is the `PeerChannel` whose questions travel. Both know lives: what belongs to a dead one fails.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

import numpy as np
import numpy.typing as npt

from kvtransfer.errors import PeerError, TransferLogicError
from kvtransfer.messages import MemoryDescription, PageCopy, ReaderId, ReadStatus, SettleReply
from kvtransfer.transports.base import ReadId
from manager import Epoch, LeaseId, WorkerName
from serving.simulation.event_queue import EventQueue
from serving.simulation.settings import FaultSettings, NetworkSettings

_NAME = "virtual"
Settle = Callable[[LeaseId, Epoch, ReaderId], SettleReply]
"""A worker's own answer, at the moment of the call."""


class VirtualNetwork:
    """Who is alive, under which epoch, and how to ask it."""

    def __init__(self, events: EventQueue, settings: NetworkSettings) -> None:
        """Nobody is there yet."""
        self.events = events
        self.settings = settings
        self._lives: dict[WorkerName, tuple[Epoch, Settle]] = {}

    def join(self, worker: WorkerName, epoch: Epoch, settle: Settle) -> None:
        """A life begins."""
        self._lives[worker] = (epoch, settle)

    def leave(self, worker: WorkerName, epoch: Epoch) -> None:
        """A life ends; a later one stays."""
        if self.is_alive(worker, epoch):
            del self._lives[worker]

    def is_alive(self, worker: WorkerName, epoch: int) -> bool:
        """Whether this very life goes on."""
        life = self._lives.get(worker)
        return life is not None and life[0] == epoch

    def settle_of(self, worker: WorkerName) -> Settle:
        """How to ask the present life. Raises PeerError when there is none."""
        life = self._lives.get(worker)
        if life is None:
            msg = f"{worker} is gone"
            raise PeerError(msg)
        return life[1]


@dataclass(slots=True)
class _Read:
    source: WorkerName
    epoch: int
    num_bytes: int
    done_s: float
    fails: bool
    is_cancelled: bool = False


class VirtualTransport:
    """A `Transport` of one life."""

    def __init__(
        self, network: VirtualNetwork, worker: WorkerName, epoch: Epoch, faults: FaultSettings, random: Random
    ) -> None:
        """`random` decides which reads fail or stall."""
        self._network = network
        self._worker = worker
        self._epoch = epoch
        self._faults = faults
        self._random = random
        self._free_s = 0.0
        self._next_id = 0
        self._reads: dict[ReadId, _Read] = {}
        self.bytes_moved = 0
        self.num_failed = 0
        self.num_stalled = 0

    @property
    def name(self) -> str:
        """As in descriptions."""
        return _NAME

    @property
    def copies_in_poll(self) -> bool:
        """Never: time moves the bytes."""
        return False

    @property
    def is_moving(self) -> bool:
        """Never: polls move nothing."""
        return False

    @property
    def needs_serving(self) -> bool:
        """Never: the network is one object."""
        return False

    def register(self, memory: npt.NDArray[np.uint8]) -> None:
        """There is no memory: refused, so that nobody waits for bytes that do not exist."""
        msg = f"{self._worker} is simulated and has no memory to register ({memory.size} bytes)"
        raise TransferLogicError(msg)

    def describe(self) -> MemoryDescription:
        """Our name and life."""
        return MemoryDescription(_NAME, {"name": self._worker, "life": int(self._epoch)})

    def read(self, source: MemoryDescription, copies: Sequence[PageCopy]) -> ReadId:
        """Start a read; it ends when its bytes have come in behind those of earlier reads."""
        name, life = source.attributes.get("name"), source.attributes.get("life")
        if source.transport != _NAME or not isinstance(name, str) or not isinstance(life, int):
            msg = f"not a description of the {_NAME} transport: {source.transport}"
            raise PeerError(msg)
        owner = WorkerName(name)
        if not self._network.is_alive(owner, life):
            msg = f"{owner} of life {life} is gone"
            raise PeerError(msg)
        settings, now_s = self._network.settings, self._network.events.now_s
        num_bytes = sum(copy.num_bytes for copy in copies)
        start_s = max(now_s + settings.transfer_latency_s, self._free_s)
        done_s = self._free_s = start_s + num_bytes / settings.bytes_per_s
        draw = self._random.random()
        fails = draw < self._faults.transfer_failure_share
        stalls = not fails and draw < self._faults.transfer_failure_share + self._faults.transfer_stall_share
        self.num_failed += fails
        self.num_stalled += stalls
        if stalls:
            done_s += self._faults.transfer_stall_s
        if fails:
            done_s = (start_s + done_s) / 2
        self._next_id += 1
        read_id = ReadId(self._next_id)
        self._reads[read_id] = _Read(owner, life, num_bytes, done_s, fails)
        return read_id

    def poll(self, read_id: ReadId) -> ReadStatus:
        """Report where the read is now."""
        read = self._reads.get(read_id)
        if read is None:
            msg = f"read {read_id} is unknown or has ended"
            raise TransferLogicError(msg)
        status = self._status(read)
        if status is not ReadStatus.PENDING:
            del self._reads[read_id]
        return status

    def _status(self, read: _Read) -> ReadStatus:
        if read.is_cancelled:
            return ReadStatus.CANCELLED
        if not self._network.is_alive(read.source, read.epoch):
            return ReadStatus.FAILED
        if self._network.events.now_s < read.done_s:
            return ReadStatus.PENDING
        self.bytes_moved += 0 if read.fails else read.num_bytes
        return ReadStatus.FAILED if read.fails else ReadStatus.DONE

    def error(self, read_id: ReadId) -> str:
        """Two causes only, and either is gone by now."""
        return f"read {read_id}: injected failure, or its source died"

    def serve(self) -> None:
        """Nothing to do."""

    def cancel(self, read_id: ReadId) -> None:
        """Stop a read; an ended one is left alone."""
        if read_id in self._reads:
            self._reads[read_id].is_cancelled = True

    def close(self) -> None:
        """Forget all reads; may be called twice."""
        self._reads.clear()


class VirtualReply:
    """An answer on its way."""

    def __init__(self) -> None:
        """Nothing has come yet."""
        self.answer: SettleReply | None = None
        self.lost: PeerError | None = None

    def result(self) -> SettleReply | None:
        """The answer, None while there is none. Raises PeerError when the owner is gone."""
        if self.lost is not None:
            raise self.lost
        return self.answer


class VirtualPeers:
    """The `PeerChannel` of one life."""

    def __init__(self, network: VirtualNetwork, on_answer: Callable[[], None]) -> None:
        """`on_answer` is called when an answer has arrived."""
        self._network = network
        self._on_answer = on_answer

    def settle(self, owner: WorkerName, lease_id: LeaseId, epoch: Epoch, reader: ReaderId) -> VirtualReply:
        """Send the question; it is answered on arrival, and the answer needs as long to come back."""
        reply = VirtualReply()
        message_s = self._network.settings.message_s

        def arrive() -> None:
            try:
                answer = self._network.settle_of(owner)(lease_id, epoch, reader)
            except PeerError as error:
                reply.lost = error
            else:
                self._network.events.after(message_s, lambda: self._deliver(reply, answer))
                return
            self._on_answer()

        self._network.events.after(message_s, arrive)
        return reply

    def _deliver(self, reply: VirtualReply, answer: SettleReply) -> None:
        reply.answer = answer
        self._on_answer()
