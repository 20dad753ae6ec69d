"""Processes of their own at either end of a network transport: an owner that serves, a reader that reads and tells."""

import time
from dataclasses import dataclass
from multiprocessing.connection import Connection

import numpy as np

from kvtransfer.messages import MemoryDescription, PageCopy, ReadStatus
from kvtransfer.transports.base import ReadId, Transport
from kvtransfer.transports.collective import CollectiveTransport
from kvtransfer.transports.nixl import NixlTransport
from tests.contract.pool_owner import PATIENCE_S, pattern

BATCH_BYTES = 1 << 20


def make_transport(kind: str, name: str) -> Transport:
    """A transport of that kind, unregistered."""
    if kind == "nixl":
        return NixlTransport(name, BATCH_BYTES)
    if kind == "collective":
        return CollectiveTransport(name, max_batch_bytes=BATCH_BYTES)
    msg = f"no process runs the transport {kind}"
    raise ValueError(msg)


def serve_a_pool(connection: Connection, kind: str, name: str, num_bytes: int, seed: int) -> None:
    """Child: fill and describe a memory, then serve it as an agent thread would until the parent hangs up."""
    transport = make_transport(kind, name)
    transport.register(pattern(num_bytes, seed))
    connection.send(transport.describe())
    try:
        while not connection.poll(0.001):
            transport.serve()
    except (EOFError, OSError):
        pass
    transport.close()


@dataclass(frozen=True)
class ReadReport:
    """How a read of the child ended."""

    status: ReadStatus
    error: str
    num_moved: int
    received: bytes
    late_bytes: int
    """Bytes that changed in its memory after the read had ended."""


def read_and_tell(connection: Connection, kind: str, num_bytes: int, seed: int) -> None:
    """Child: on each description that comes, read all of it; say `started` after the first bytes; then report.

    The second message for a read is `go` or `cancel`.
    """
    transport = make_transport(kind, "reader")
    memory = np.zeros(num_bytes, dtype=np.uint8)
    transport.register(memory)
    connection.send("ready")
    while connection.poll(PATIENCE_S):
        try:
            source: MemoryDescription = connection.recv()
        except EOFError:
            break
        memory.fill(0)
        connection.send(_report(connection, transport, memory, source))
    transport.close()


def _report(
    connection: Connection,
    transport: Transport,
    memory: np.ndarray[tuple[int], np.dtype[np.uint8]],
    source: MemoryDescription,
) -> ReadReport:
    moved_before = transport.bytes_moved
    read_id = transport.read(source, [PageCopy(0, 0, memory.size)])
    status = ReadStatus.PENDING
    while status is ReadStatus.PENDING and transport.bytes_moved == moved_before:
        status = transport.poll(read_id)
    connection.send("started")
    if connection.recv() == "cancel":
        transport.cancel(read_id)
    if status is ReadStatus.PENDING:
        status = finish(transport, read_id)
    at_end = memory.copy()
    time.sleep(0.05)
    late_bytes = int((memory != at_end).sum())
    error = transport.error(read_id)
    return ReadReport(status, error, transport.bytes_moved - moved_before, at_end.tobytes(), late_bytes)


def finish(transport: Transport, read_id: ReadId) -> ReadStatus:
    """Poll until the read has ended."""
    end_s = time.monotonic() + PATIENCE_S
    while (status := transport.poll(read_id)) is ReadStatus.PENDING:
        if time.monotonic() > end_s:
            msg = "the read does not end"
            raise TimeoutError(msg)
    return status
