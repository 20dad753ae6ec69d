"""Speed of the transports between two processes of this host, against memcpy in the same run.

The source pool belongs to a child process; pages lie scattered, so that no two of them merge into one run.
Memory is touched before the clock starts on both sides: the first touch of new shared memory costs 1 ms per
MB and says nothing of the transport. memcpy moves the same pages between two private memories, turn by turn
with the transport, so that a neighbour's load meets both.

The size of the operating system's pages decides memcpy's speed (measured: 8.5 GB/s with 4 KB, 15.6 with 2 MB),
and files under /dev/shm have 4 KB pages unless the kernel's `shmem_enabled` says otherwise. In a virtual machine
the host's pages decide as well, which nobody sees from inside: the same copy runs at 11 GB/s in one pool and at 14
in the next. So there are three references: `of_memcpy` against other memory with pages like the pool's,
`of_huge_memcpy` against huge pages, which is what this machine could do, and, where both sides can be mapped,
`of_same_memcpy` against the very same bytes, which shows what the transport itself costs. The local transports are
measured over several fresh pools; a figure is the median of the pools'.

Before each copy other memory goes through the caches, and each turn begins with another side: else the copy that
comes after its own memory's copy finds half of 16 MB in the cache (measured: 0.68 to 1.0 of memcpy for the same code).
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
from functools import partial
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
_POOLS = 5
_CACHE_BYTES = 64 << 20
"""More than the last cache of the machines this runs on."""


Memories = tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]
"""What a read copies from, and what it copies to; [num_bytes] each."""


class TransportRow(TypedDict):
    """One row of the table, as it is printed and written to JSON.

    `bytes` is the payload of one read and `gb_s` payload in 1e9 bytes per second; `of_memcpy`, `of_huge_memcpy` and
    `of_same_memcpy` (None where this process cannot map the source) are that divided by memcpy's. `fixed_us` is the
    microseconds of a read of one byte, `descriptors` the runs of a read.
    """

    transport: str
    bytes: int
    gb_s: float
    of_memcpy: float
    of_huge_memcpy: float
    of_same_memcpy: float | None
    fixed_us: float
    descriptors: int


def run(
    sizes_bytes: Sequence[int] = SIZES_BYTES, page_bytes: int = PAGE_BYTES, repeats: int = 15
) -> list[TransportRow]:
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
    for pair in (_shared_memory_pair, _inprocess_pair):
        pools: list[list[TransportRow]] = []
        for _ in range(_POOLS):
            with pair(pool_bytes) as (transport, source, same):
                pools.append(measure(transport, source, sizes_bytes, page_bytes, repeats, same))
        rows += [_median_row(of_pools) for of_pools in zip(*pools, strict=True)]
    from serving.bench.network_transport import network_rows  # which measures with this module

    return rows + network_rows(sizes_bytes, page_bytes, repeats)


def measure(
    transport: Transport,
    source: MemoryDescription,
    sizes_bytes: Sequence[int],
    page_bytes: int,
    repeats: int,
    same: Memories | None = None,
) -> list[TransportRow]:
    """Rows of one transport, whose memory and `source` hold the largest size; `same` is both of them, if mapped."""
    fixed_s = statistics.median(
        _seconds(lambda: _read(transport, source, [PageCopy(0, 0, 1)])) for _ in range(_FIXED_REPEATS)
    )
    pool_bytes = max(sizes_bytes)
    small, huge = (touched(pool_bytes), touched(pool_bytes)), (_huge(pool_bytes), _huge(pool_bytes))
    rows: list[TransportRow] = []
    for num_bytes in sizes_bytes:
        copies = _scattered(num_bytes, page_bytes)
        sides = [
            partial(_read, transport, source, copies),
            partial(_memcpy, *small, copies),
            partial(_memcpy, *huge, copies),
        ]
        if same is not None:
            sides.append(partial(_memcpy, *same, copies))
        seconds, small_s, huge_s, *same_s = _best_seconds(sides, repeats)
        rows.append(
            {
                "transport": transport.name,
                "bytes": num_bytes,
                "gb_s": round(num_bytes / seconds / 1e9, 2),
                "of_memcpy": round(small_s / seconds, 2),
                "of_huge_memcpy": round(huge_s / seconds, 2),
                "of_same_memcpy": round(same_s[0] / seconds, 2) if same_s else None,
                "fixed_us": round(fixed_s * 1e6, 1),
                "descriptors": len(copies),
            }
        )
    return rows


def _median_row(rows: Sequence[TransportRow]) -> TransportRow:
    """The rows of the same payload over several pools as one, each figure a median."""
    same = [row["of_same_memcpy"] for row in rows if row["of_same_memcpy"] is not None]
    return {
        "transport": rows[0]["transport"],
        "bytes": rows[0]["bytes"],
        "gb_s": statistics.median(row["gb_s"] for row in rows),
        "of_memcpy": statistics.median(row["of_memcpy"] for row in rows),
        "of_huge_memcpy": statistics.median(row["of_huge_memcpy"] for row in rows),
        "of_same_memcpy": statistics.median(same) if same else None,
        "fixed_us": statistics.median(row["fixed_us"] for row in rows),
        "descriptors": rows[0]["descriptors"],
    }


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


def _best_seconds(sides: Sequence[Callable[[], None]], repeats: int) -> list[float]:
    """Shortest time of each side, of `repeats` turns after a first one that maps and warms."""
    best = [math.inf] * len(sides)
    other = touched(_CACHE_BYTES)
    for turn in range(repeats + 1):
        for place in range(len(sides)):
            side = (turn + place) % len(sides)
            other.fill(turn % 256)
            best[side] = min(best[side], _seconds(sides[side]))
    return best


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
def _inprocess_pair(pool_bytes: int) -> Iterator[tuple[Transport, MemoryDescription, Memories]]:
    registry = InProcessRegistry()
    owner, reader = InProcessTransport(registry, "owner"), InProcessTransport(registry, "reader")
    memories = touched(pool_bytes), touched(pool_bytes)
    owner.register(memories[0])
    reader.register(memories[1])
    yield reader, owner.describe(), memories
    reader.close()
    owner.close()


@contextmanager
def _shared_memory_pair(pool_bytes: int) -> Iterator[tuple[Transport, MemoryDescription, Memories]]:
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
            own = create_pool(path, pool_bytes)
            reader.register(own)
            yield reader, source, (np.memmap(Path(folder) / "owner", dtype=np.uint8, mode="r"), own)
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
