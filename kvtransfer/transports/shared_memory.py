"""Reads between processes of one host: every pool is a file under /dev/shm, mapped by whoever reads it.

The owner creates its file (`create_pool`) and keeps its pool in it; a reader maps that file read-only and
copies runs of bytes into its own registered memory. Nobody writes into another process's pool (M7).

Why mmap on files and not `multiprocessing.shared_memory`: Python 3.11's resource tracker unlinks a segment
when any process that attached it ends, the owner's included.

A description carries the host's boot id, the path and the inode, so that a path that means another file by
now (another host, a restarted worker) is refused and not read. A pool file is never truncated while it may
be mapped: reading past a shrunk end would kill the reader (SIGBUS). Owners only unlink. Mappings are
cached by path and inode and dropped once the file is gone or replaced, so that a dead worker's pool does
not keep its memory.
"""

import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvtransfer.errors import PeerError, PeerUnreachable, TransferLogicError
from kvtransfer.messages import MemoryDescription, PageCopy, ReadStatus
from kvtransfer.transports.base import ReadId
from kvtransfer.transports.description import attribute
from kvtransfer.transports.local_copy import DEFAULT_MAX_POLL_BYTES, LocalCopy
from kvtransfer.transports.runs import check_memory

_NAME = "shared_memory"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def create_pool(path: Path, num_bytes: int) -> npt.NDArray[np.uint8]:
    """Create a zeroed pool file and map it, every page of it touched (the first touch costs 1 ms per MB).

    The caller unlinks the file when its worker ends; the memory lives until the last mapping goes.

    Args:
        path: a new file in the run folder, under /dev/shm.
        num_bytes: its size; above 0.

    Returns:
        The memory, [num_bytes] uint8, shared and writable.

    Raises:
        FileExistsError: the file exists; a worker's every life takes a new name.
        OSError: the file system has no room for it.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        # Reserves the memory: without it, a full /dev/shm would show as SIGBUS in the middle of a step.
        os.posix_fallocate(descriptor, 0, num_bytes)
        mapping = mmap.mmap(descriptor, num_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    except OSError:
        path.unlink()
        raise
    finally:
        os.close(descriptor)
    return np.frombuffer(mapping, dtype=np.uint8)


@dataclass(frozen=True, slots=True)
class _Address:
    """What a description of this transport says."""

    path: str
    inode: int
    device: int
    num_bytes: int


@dataclass(slots=True)
class _Mapping:
    """A peer's pool file, mapped read-only. Unmapped when nothing refers to `memory` any more."""

    address: _Address
    memory: npt.NDArray[np.uint8]


@dataclass(slots=True)
class _Read:
    address: _Address
    local_copy: LocalCopy
    is_cancelled: bool = field(default=False)


class SharedMemoryTransport:
    """A `Transport` over pool files of one host.

    Args:
        path: the file in which our own memory lies (from `create_pool`).
        max_poll_bytes: bytes that one poll copies at most.
    """

    def __init__(self, path: Path, max_poll_bytes: int = DEFAULT_MAX_POLL_BYTES) -> None:
        """Start without memory."""
        self._path = path
        self._max_poll_bytes = max_poll_bytes
        self._memory: npt.NDArray[np.uint8] | None = None
        self._description: MemoryDescription | None = None
        self._boot_id = _BOOT_ID.read_text().strip()
        self._mappings: dict[str, _Mapping] = {}
        self._reads: dict[ReadId, _Read] = {}
        self._next_id = 0
        self._bytes_moved = 0
        self._last_error: tuple[ReadId, str] | None = None

    @property
    def name(self) -> str:
        """As in `TransferConfig.transport`."""
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
        """Never: readers map the file themselves."""
        return False

    @property
    def num_mappings(self) -> int:
        """Peers' pools that are mapped now."""
        return len(self._mappings)

    @property
    def bytes_moved(self) -> int:
        """Bytes that our reads have copied so far."""
        return self._bytes_moved

    def register(self, memory: npt.NDArray[np.uint8]) -> None:
        """Make `memory`, which must lie in our file, readable by peers and writable by our reads. Once.

        Raises:
            TransferLogicError: called twice, not plain bytes, or the file is missing or of another size.
        """
        if self._memory is not None:
            msg = f"{self._path} is registered already"
            raise TransferLogicError(msg)
        check_memory(memory)
        try:
            status = self._path.stat()
        except OSError as error:
            msg = f"the pool file must exist before it is registered: {error}"
            raise TransferLogicError(msg) from error
        if status.st_size != memory.size:
            msg = f"{self._path} has {status.st_size} bytes, the memory to register {memory.size}"
            raise TransferLogicError(msg)
        self._memory = memory
        self._description = MemoryDescription(
            _NAME,
            {
                "boot_id": self._boot_id,
                "path": str(self._path.absolute()),
                "inode": status.st_ino,
                "device": status.st_dev,
                "num_bytes": status.st_size,
            },
        )

    def describe(self) -> MemoryDescription:
        """Where our file is, and which file of that name it is."""
        if self._description is None:
            msg = f"{self._path} is not registered"
            raise TransferLogicError(msg)
        return self._description

    def read(self, source: MemoryDescription, copies: Sequence[PageCopy]) -> ReadId:
        """Start a read. Raises PeerError before any byte moves: wrong host, file gone or replaced, bad runs."""
        if self._memory is None:
            msg = f"{self._path} is not registered: there is nothing to read into"
            raise TransferLogicError(msg)
        self._drop_stale_mappings()
        address = self._address(source)
        mapping = self._mapping(address)
        local_copy = LocalCopy(mapping.memory, self._memory, copies)
        self._next_id += 1
        read_id = ReadId(self._next_id)
        self._reads[read_id] = _Read(address, local_copy)
        return read_id

    def poll(self, read_id: ReadId) -> ReadStatus:
        """Copy up to `max_poll_bytes` and report. FAILED when the peer's file is gone meanwhile."""
        read = self._reads.get(read_id)
        if read is None:
            msg = f"read {read_id} is unknown or has ended"
            raise TransferLogicError(msg)
        if read.is_cancelled:
            del self._reads[read_id]
            return ReadStatus.CANCELLED
        reason = _why_stale(read.address)
        if reason:
            del self._reads[read_id]
            self._last_error = (read_id, reason)
            return ReadStatus.FAILED
        is_done = read.local_copy.advance(self._max_poll_bytes)
        self._bytes_moved += read.local_copy.take_count()
        if not is_done:
            return ReadStatus.PENDING
        del self._reads[read_id]
        return ReadStatus.DONE

    def error(self, read_id: ReadId) -> str:
        """Why the last read that failed did, if it was `read_id`."""
        return self._last_error[1] if self._last_error and self._last_error[0] == read_id else ""

    def serve(self) -> None:
        """Nothing to do."""

    def cancel(self, read_id: ReadId) -> None:
        """Stop a read; an ended one is left alone."""
        read = self._reads.get(read_id)
        if read is not None:
            read.is_cancelled = True

    def close(self) -> None:
        """Forget all reads and mappings; may be called twice. Our own file is its creator's to unlink."""
        self._reads.clear()
        self._mappings.clear()

    def _address(self, source: MemoryDescription) -> _Address:
        address = _Address(
            attribute(source, _NAME, "path", str),
            attribute(source, _NAME, "inode", int),
            attribute(source, _NAME, "device", int),
            attribute(source, _NAME, "num_bytes", int),
        )
        if address.num_bytes <= 0:
            msg = f"not a description of the {_NAME} transport: {address.num_bytes} bytes"
            raise PeerError(msg)
        if source.attributes.get("boot_id") != self._boot_id:
            msg = f"{address.path} is on another host; {_NAME} works on one host only"
            raise PeerUnreachable(msg)
        return address

    def _mapping(self, address: _Address) -> _Mapping:
        known = self._mappings.get(address.path)
        if known is not None and known.address == address:
            return known
        try:
            descriptor = os.open(address.path, os.O_RDONLY)
        except OSError as error:
            # It is gone, or its owner sees another /dev/shm than we do.
            msg = f"the peer's pool file cannot be opened: {error}"
            raise PeerUnreachable(msg) from error
        try:
            reason = _difference(address, os.fstat(descriptor))
            if reason:
                raise PeerError(reason)
            mapped = mmap.mmap(descriptor, address.num_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        except OSError as error:
            msg = f"{address.path} cannot be mapped: {error}"
            raise PeerError(msg) from error
        finally:
            os.close(descriptor)
        mapping = _Mapping(address, np.frombuffer(mapped, dtype=np.uint8))
        self._mappings[address.path] = mapping
        return mapping

    def _drop_stale_mappings(self) -> None:
        for path, mapping in list(self._mappings.items()):
            if _why_stale(mapping.address):
                del self._mappings[path]


def _why_stale(address: _Address) -> str:
    """Why the file of that path is no longer the one described; empty while it is."""
    try:
        status = os.stat(address.path)
    except OSError as error:
        return f"the peer's pool file is gone: {error}"
    return _difference(address, status)


def _difference(address: _Address, status: os.stat_result) -> str:
    if (status.st_ino, status.st_dev) != (address.inode, address.device):
        return f"{address.path} was replaced: it is another file than the one described"
    if status.st_size < address.num_bytes:
        return f"{address.path} has shrunk to {status.st_size} of {address.num_bytes} bytes"
    return ""
