"""Reads through NIXL: UCX over shared memory, TCP or RDMA, whichever the two hosts have.

One-sided: the owner does not know of a read. A read is posted as batches of bounded size, one at a time, for
two reasons. A posted batch cannot be recalled (NIXL's release asks UCX to cancel and does not wait for it to have
stopped), so a cancel is "no further batch" and takes effect when the one under way has ended. And over shared
memory a batch is copied inside the call that posts it, so it must not hold the agent's thread for long.

NIXL's own progress thread spins on a core as long as it lives; it is off. Instead `poll` drives our reads, and
`serve` drives what peers' reads need of us (connections; over TCP every byte).

NIXL is an extra (`pip install pdserve[nixl]`); without it the constructor raises `TransportUnavailable`.
"""

import importlib
import importlib.util
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtransfer.errors import PeerError, PeerUnreachable, TransferLogicError, TransportUnavailable
from kvtransfer.messages import MemoryDescription, PageCopy, ReadStatus
from kvtransfer.transports.base import ReadId
from kvtransfer.transports.description import attribute
from kvtransfer.transports.runs import Run, batches_of, check_memory, checked_runs

_NAME = "nixl"
_log = logging.getLogger(__name__)
_MAX_BATCH_BYTES = 8 << 20
"""Copied in one call over shared memory: 1-2 ms."""
_MAX_BATCH_RUNS = 256
"""A run costs about 12 us to post."""


def why_unavailable() -> str:
    """Why NIXL cannot be used here; empty when it can."""
    if importlib.util.find_spec("nixl") is None:
        return "the package nixl is not installed"
    return ""


@dataclass(frozen=True, slots=True)
class _Peer:
    """What a description of this transport says."""

    agent: str
    metadata: bytes
    address: int
    num_bytes: int


@dataclass(slots=True)
class _Read:
    peer: _Peer
    batches: Iterator[list[Run]]
    handle: Any = None
    """Of the batch under way; NIXL's handles have no static type."""
    batch_bytes: int = 0
    is_cancelled: bool = False
    error: str = ""


@dataclass(slots=True)
class _Registered:
    """Our memory; kept alive for as long as NIXL may write into it."""

    memory: npt.NDArray[np.uint8]
    address: int
    description: MemoryDescription
    registration: Any = field(repr=False)


class NixlTransport:
    """A `Transport` over one NIXL agent. One thread at a time.

    Args:
        agent_name: `<worker>.<epoch>`, unique among the peers: NIXL takes it for the identity of a memory.
        max_batch_bytes: bytes that one batch moves at most.

    Raises:
        TransportUnavailable: NIXL or its UCX backend is missing.
    """

    def __init__(self, agent_name: str, max_batch_bytes: int = _MAX_BATCH_BYTES) -> None:
        """Start the agent without memory."""
        self._agent_name = agent_name
        self._max_batch_bytes = max_batch_bytes
        self._agent = _make_agent(agent_name)
        self._own: _Registered | None = None
        self._peers: dict[str, _Peer] = {}
        self._reads: dict[ReadId, _Read] = {}
        self._next_id = 0
        self._bytes_moved = 0
        self._is_moving = False
        self._last_error: tuple[ReadId, str] | None = None

    @property
    def name(self) -> str:
        """As in `TransferConfig.transport`."""
        return _NAME

    @property
    def copies_in_poll(self) -> bool:
        """Never: a batch that was posted moves on its own."""
        return False

    @property
    def is_moving(self) -> bool:
        """Whether the last batch was done as it was posted (shared memory); over a wire, polls only look."""
        return self._is_moving

    @property
    def needs_serving(self) -> bool:
        """Always: there is no progress thread."""
        return True

    @property
    def bytes_moved(self) -> int:
        """Bytes of the batches that have ended well."""
        return self._bytes_moved

    def register(self, memory: npt.NDArray[np.uint8]) -> None:
        """Make `memory` readable by peers and writable by our reads. Once."""
        if self._own is not None:
            msg = f"{self._agent_name} registered its memory already"
            raise TransferLogicError(msg)
        check_memory(memory)
        address = memory.ctypes.data
        registration = self._agent.register_memory([(address, memory.size, 0, "")], "DRAM")
        attributes = {
            "agent": self._agent_name,
            "metadata": self._agent.get_agent_metadata(),
            "address": address,
            "num_bytes": memory.size,
        }
        self._own = _Registered(memory, address, MemoryDescription(_NAME, attributes), registration)

    def describe(self) -> MemoryDescription:
        """Our agent's metadata, and where its memory begins."""
        return self._registered().description

    def read(self, source: MemoryDescription, copies: Sequence[PageCopy]) -> ReadId:
        """Start a read; the first `poll` posts its first batch. Raises PeerError before any byte moves."""
        own = self._registered()
        peer = _peer(source)
        runs = checked_runs(copies, peer.num_bytes, own.memory.size)
        self._connect(peer)
        self._next_id += 1
        read_id = ReadId(self._next_id)
        self._reads[read_id] = _Read(peer, batches_of(runs, self._max_batch_bytes, _MAX_BATCH_RUNS))
        self._is_moving = True
        return read_id

    def poll(self, read_id: ReadId) -> ReadStatus:
        """See how the batch under way is, and post the next one when it has ended."""
        read = self._reads.get(read_id)
        if read is None:
            msg = f"read {read_id} is unknown or has ended"
            raise TransferLogicError(msg)
        self._is_moving = False
        if read.error:
            return self._fail(read_id, read)
        try:
            status = self._advance(read)
        except Exception as error:  # NIXL's exceptions have no common base; each is about this read's peer
            read.error = f"the NIXL agent {read.peer.agent} is gone: {type(error).__name__}: {error}"
            return ReadStatus.PENDING
        if status is not ReadStatus.PENDING:
            del self._reads[read_id]
        return status

    def error(self, read_id: ReadId) -> str:
        """Why the last read that failed did, if it was `read_id`."""
        return self._last_error[1] if self._last_error and self._last_error[0] == read_id else ""

    def serve(self) -> None:
        """Let UCX answer peers. Notifications, of which we use none, are how NIXL's API progresses."""
        self._agent.get_new_notifs()

    def cancel(self, read_id: ReadId) -> None:
        """Post no further batch of this read; an ended one is left alone."""
        read = self._reads.get(read_id)
        if read is not None:
            read.is_cancelled = True

    def close(self) -> None:
        """End the agent; may be called twice. Reads under way are cut off: the process is about to end."""
        if self._own is not None:
            self._agent.deregister_memory(self._own.registration)
            self._own = None
        for read in self._reads.values():
            if read.handle is not None:
                read.handle.release()
        self._reads.clear()
        for name in list(self._peers):
            self._disconnect(name)
        self._agent = None

    def _registered(self) -> _Registered:
        if self._own is None:
            msg = f"{self._agent_name} has no registered memory"
            raise TransferLogicError(msg)
        return self._own

    def _connect(self, peer: _Peer) -> None:
        if peer.agent in self._peers:
            return
        try:
            self._agent.add_remote_agent(peer.metadata)
        except Exception as error:
            msg = f"the NIXL agent {peer.agent} cannot be reached: {type(error).__name__}: {error}"
            raise PeerUnreachable(msg) from error
        self._peers[peer.agent] = peer
        # An earlier life of the same worker is dead, whether we ever noticed or not.
        worker, reading = peer.agent.rpartition(".")[0], {read.peer.agent for read in self._reads.values()}
        for name in set(self._peers) - {peer.agent} - reading:
            if worker and name.rpartition(".")[0] == worker:
                self._disconnect(name)

    def _disconnect(self, agent: str) -> None:
        if self._peers.pop(agent, None) is not None:
            try:
                self._agent.remove_remote_agent(agent)
            except Exception as error:
                _log.warning("%s: NIXL could not forget %s: %s", self._agent_name, agent, error)

    def _advance(self, read: _Read) -> ReadStatus:
        """At most one batch is posted. Raises what NIXL raises, or PeerError for an error state."""
        if read.handle is not None:
            state = self._agent.check_xfer_state(read.handle)
            if state == "PROC":
                return ReadStatus.PENDING
            self._end_batch(read, state)
        if read.is_cancelled:
            return ReadStatus.CANCELLED
        batch = next(read.batches, None)
        if batch is None:
            return ReadStatus.DONE
        state = self._post(read, batch)
        if state != "PROC":
            self._end_batch(read, state)
            self._is_moving = True
        return ReadStatus.PENDING

    def _post(self, read: _Read, batch: list[Run]) -> str:
        own = self._registered()
        runs = np.array(batch, dtype=np.uint64)
        places = np.zeros((2, len(batch), 3), dtype=np.uint64)  # address, bytes, device
        places[0, :, 0] = runs[:, 1] + np.uint64(own.address)
        places[1, :, 0] = runs[:, 0] + np.uint64(read.peer.address)
        places[:, :, 1] = runs[:, 2]
        ours = self._agent.get_xfer_descs(places[0], "DRAM")
        theirs = self._agent.get_xfer_descs(places[1], "DRAM")
        read.batch_bytes = sum(num_bytes for _, _, num_bytes in batch)
        read.handle = self._agent.initialize_xfer("READ", ours, theirs, read.peer.agent)
        return str(self._agent.transfer(read.handle))

    def _end_batch(self, read: _Read, state: str) -> None:
        if state != "DONE":
            msg = f"state {state}"
            raise PeerError(msg)
        self._bytes_moved += read.batch_bytes
        read.handle.release()
        read.handle = None

    def _fail(self, read_id: ReadId, read: _Read) -> ReadStatus:
        """Cut the connection before the read's pages are given back: nothing of it can arrive after that.

        Other reads of that peer find the connection gone and fail in turn.
        """
        self._disconnect(read.peer.agent)
        if read.handle is not None:
            try:
                read.handle.release()
            except Exception as error:  # still under way; asked again at the next poll
                _log.warning("%s: a batch of %s has not stopped: %s", self._agent_name, read.peer.agent, error)
                return ReadStatus.PENDING
        self._agent.get_new_notifs()
        del self._reads[read_id]
        self._last_error = (read_id, read.error)
        return ReadStatus.FAILED


def _make_agent(agent_name: str) -> Any:
    reason = why_unavailable()
    if reason:
        raise TransportUnavailable(reason)
    api = importlib.import_module("nixl._api")
    logging.getLogger("nixl").setLevel(logging.WARNING)
    config = api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
    agent = api.nixl_agent(agent_name, config)
    if "UCX" not in agent.backends:
        msg = f"NIXL has no UCX backend here, only {sorted(agent.plugin_list)}"
        raise TransportUnavailable(msg)
    return agent


def _peer(source: MemoryDescription) -> _Peer:
    return _Peer(
        attribute(source, _NAME, "agent", str),
        attribute(source, _NAME, "metadata", bytes),
        attribute(source, _NAME, "address", int),
        attribute(source, _NAME, "num_bytes", int),
    )
