"""A process of its own that owns a pool file: the other end of the tests between processes."""

import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np

from kvtransfer.messages import MemoryDescription, PageCopy, ReadStatus
from kvtransfer.transports.shared_memory import SharedMemoryTransport, create_pool

PATIENCE_S = 60.0


def pattern(num_bytes: int, seed: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """The same bytes in every process."""
    return np.random.default_rng(seed).integers(0, 256, num_bytes, dtype=np.uint8)


def own_a_pool(connection: Connection, path: Path, num_bytes: int, seed: int) -> None:
    """Child: create, fill and describe a pool, then live until the parent hangs up or says `unlink`."""
    memory = create_pool(path, num_bytes)
    memory[:] = pattern(num_bytes, seed)
    transport = SharedMemoryTransport(path)
    transport.register(memory)
    connection.send(transport.describe())
    if connection.poll(PATIENCE_S) and connection.recv() == "unlink":
        path.unlink()
        connection.send("unlinked")
        connection.poll(PATIENCE_S)


@dataclass(frozen=True)
class ReaderReport:
    """What a reading child did."""

    pid: int
    status: ReadStatus
    received: bytes


def read_all_and_exit(connection: Connection, path: Path, source: MemoryDescription, num_bytes: int) -> None:
    """Child: read the whole of `source` into a pool of its own, send the bytes, and end."""
    memory = create_pool(path, num_bytes)
    transport = SharedMemoryTransport(path)
    transport.register(memory)
    read_id = transport.read(source, [PageCopy(0, 0, num_bytes)])
    while (status := transport.poll(read_id)) is ReadStatus.PENDING:
        pass
    connection.send(ReaderReport(os.getpid(), status, memory.tobytes()))


@dataclass
class Child:
    """A running child and our end of its pipe."""

    process: BaseProcess
    connection: Connection

    def receive(self) -> object:
        """Its next message; fails the test when there is none in time."""
        assert self.connection.poll(PATIENCE_S), "the child says nothing"
        return self.connection.recv()


@contextmanager
def child_process(target: object, *args: object) -> Iterator[Child]:
    """Start `target(connection, *args)` in a fresh interpreter; end it at the end."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(theirs, *args), daemon=True)  # type: ignore[arg-type]
    process.start()
    theirs.close()
    try:
        yield Child(process, ours)
    finally:
        ours.close()
        process.join(5.0)
        process.kill()
        process.join()
        process.close()
