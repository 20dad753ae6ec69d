"""Speed of the transports between two processes of this host, against memcpy in the same run.

The source pool belongs to a child process; pages lie scattered, so that no two of them merge into one run.
Memory is touched before the clock starts on both sides: the first touch of new shared memory costs 1 ms per
MB and says nothing of the transport. memcpy moves the same pages between two private memories, turn by turn
with the transport, so that a neighbour's load meets both.

The size of the operating system's pages decides memcpy's speed (measured: 8.5 GB/s with 4 KB, 15.6 with 2 MB),
and files under /dev/shm have 4 KB pages unless the kernel's `shmem_enabled` says otherwise. So there are two
references: `of_memcpy` against memory with pages like theirs, which is what the transport's own cost shows
in, and `of_huge_memcpy` against huge pages, which is what this machine could do.

Speeds are the best of the turns on every side: other load only ever adds time, and on a busy machine a median
measures the load. `fixed_us` is the median time of a read of one byte, from `read` to DONE.
"""

import math
import mmap
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypedDict

import numpy as np
import numpy.typing as npt

from kvtransfer.messages import MemoryDescription, PageCopy, ReadStatus
from kvtransfer.transports.base import Transport
from kvtransfer.transports.inprocess import InProcessRegistry, InProcessTransport
from kvtransfer.transports.shared_memory import SharedMemoryTransport, create_pool

SIZES_BYTES = (1 << 20, 16 << 20, 64 << 20, 256 << 20)
PAGE_BYTES = 256 << 10
_FIXED_REPEATS = 200
_WAIT_S = 50e-6


class TransportRow(TypedDict):
    """One row of the table, as it is printed and written to JSON.

    `bytes` is the payload of one read, `gb_s` payload in 1e9 bytes per second, `of_memcpy` and `of_huge_memcpy`
    that divided by memcpy's, `fixed_us` the microseconds of a read of one byte, `descriptors` the runs of a read.
    """

    transport: str
    bytes: int
    gb_s: float
    of_memcpy: float
    of_huge_memcpy: float
    fixed_us: float
    descriptors: int


def run(sizes_bytes: Sequence[int] = SIZES_BYTES, page_bytes: int = PAGE_BYTES, repeats: int = 7) -> list[TransportRow]:
    """Measure every transport that is installed, between processes of this host.

    Args:
        sizes_bytes: payloads; each a multiple of `page_bytes`.
        page_bytes: size of a page, the contiguous piece.
        repeats: turns per size, of which the best counts.

    Returns:
        A row per transport and size.
    """
    pool_bytes = max(sizes_bytes)
    rows: list[TransportRow] = []
    with _shared_memory_pair(pool_bytes) as (transport, source):
        rows += measure(transport, source, sizes_bytes, page_bytes, repeats)
    with _inprocess_pair(pool_bytes) as (transport, source):
        rows += measure(transport, source, sizes_bytes, page_bytes, repeats)
    from serving.bench.network_transport import network_rows  # which measures with this module

    return rows + network_rows(sizes_bytes, page_bytes, repeats)


def measure(
    transport: Transport, source: MemoryDescription, sizes_bytes: Sequence[int], page_bytes: int, repeats: int
) -> list[TransportRow]:
    """Rows of one transport, whose memory and `source` hold the largest size."""
    fixed_s = statistics.median(
        _seconds(lambda: _read(transport, source, [PageCopy(0, 0, 1)])) for _ in range(_FIXED_REPEATS)
    )
    pool_bytes = max(sizes_bytes)
    small, huge = (touched(pool_bytes), touched(pool_bytes)), (_huge(pool_bytes), _huge(pool_bytes))
    rows: list[TransportRow] = []
    for num_bytes in sizes_bytes:
        copies = _scattered(num_bytes, page_bytes)
        seconds = small_s = huge_s = math.inf
        for _ in range(repeats + 1):  # the first turn maps and warms
            seconds = min(seconds, _seconds(lambda: _read(transport, source, copies)))  # noqa: B023 -- called at once
            small_s = min(small_s, _seconds(lambda: _memcpy(*small, copies)))  # noqa: B023
            huge_s = min(huge_s, _seconds(lambda: _memcpy(*huge, copies)))  # noqa: B023
        rows.append(
            {
                "transport": transport.name,
                "bytes": num_bytes,
                "gb_s": round(num_bytes / seconds / 1e9, 2),
                "of_memcpy": round(small_s / seconds, 2),
                "of_huge_memcpy": round(huge_s / seconds, 2),
                "fixed_us": round(fixed_s * 1e6, 1),
                "descriptors": len(copies),
            }
        )
    return rows


def _scattered(num_bytes: int, page_bytes: int) -> list[PageCopy]:
    """Every page of the payload, in opposite order on the two sides."""
    num_pages = num_bytes // page_bytes
    if not num_pages or num_bytes % page_bytes:
        msg = f"{num_bytes} bytes are no whole pages of {page_bytes}"
        raise ValueError(msg)
    return [PageCopy(n * page_bytes, (num_pages - 1 - n) * page_bytes, page_bytes) for n in range(num_pages)]


def _read(transport: Transport, source: MemoryDescription, copies: Sequence[PageCopy]) -> None:
    read_id = transport.read(source, copies)
    while (status := transport.poll(read_id)) is ReadStatus.PENDING:
        if not transport.is_moving:
            time.sleep(_WAIT_S)  # lets the threads of a transport run, as an agent does
    if status is not ReadStatus.DONE:
        msg = f"{transport.name}: the read ended as {status}: {transport.error(read_id)}"
        raise RuntimeError(msg)


def _memcpy(source: npt.NDArray[np.uint8], destination: npt.NDArray[np.uint8], copies: Sequence[PageCopy]) -> None:
    for copy in copies:
        run_ = source[copy.source_offset : copy.source_offset + copy.num_bytes]
        destination[copy.destination_offset : copy.destination_offset + copy.num_bytes] = run_


def _seconds(action: Callable[[], None]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def touched(num_bytes: int) -> npt.NDArray[np.uint8]:
    """Private memory with the smallest pages."""
    return _private(num_bytes, mmap.MADV_NOHUGEPAGE)


def _huge(num_bytes: int) -> npt.NDArray[np.uint8]:
    """Private memory with the largest pages that the kernel gives."""
    return _private(num_bytes, mmap.MADV_HUGEPAGE)


def _private(num_bytes: int, advice: int) -> npt.NDArray[np.uint8]:
    mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapping.madvise(advice)
    memory = np.frombuffer(mapping, dtype=np.uint8)
    memory.fill(1)
    return memory


@contextmanager
def _inprocess_pair(pool_bytes: int) -> Iterator[tuple[Transport, MemoryDescription]]:
    registry = InProcessRegistry()
    owner, reader = InProcessTransport(registry, "owner"), InProcessTransport(registry, "reader")
    owner.register(touched(pool_bytes))
    reader.register(touched(pool_bytes))
    yield reader, owner.describe()
    reader.close()
    owner.close()


@contextmanager
def _shared_memory_pair(pool_bytes: int) -> Iterator[tuple[Transport, MemoryDescription]]:
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="pdserve-bench-") as folder:
        ours, theirs = context.Pipe()
        child = context.Process(target=_own_pool, args=(theirs, Path(folder) / "owner", pool_bytes), daemon=True)
        child.start()
        theirs.close()
        try:
            source = ours.recv()
            path = Path(folder) / "reader"
            reader = SharedMemoryTransport(path)
            reader.register(create_pool(path, pool_bytes))
            yield reader, source
            reader.close()
        finally:
            ours.close()  # the child waits for this
            child.join()


def _own_pool(connection: Connection, path: Path, num_bytes: int) -> None:
    """Child: own a filled pool until the parent hangs up."""
    memory = create_pool(path, num_bytes)
    memory.fill(1)
    transport = SharedMemoryTransport(path)
    transport.register(memory)
    connection.send(transport.describe())
    connection.poll(None)
