"""Shared memory between real processes: bytes, deaths, and that a reader's end costs the owner nothing."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvtransfer.errors import PeerError
from kvtransfer.messages import MemoryDescription, PageCopy, ReadStatus
from kvtransfer.transports.shared_memory import SharedMemoryTransport, create_pool
from tests.contract.pool_owner import ReaderReport, child_process, own_a_pool, pattern, read_all_and_exit

POOL_BYTES = 1 << 16
SEED = 5


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="pdserve-test-") as name:
        yield Path(name)


def description(message: object) -> MemoryDescription:
    assert isinstance(message, MemoryDescription)
    return message


def drain(transport: SharedMemoryTransport, source: MemoryDescription, copies: list[PageCopy]) -> ReadStatus:
    read_id = transport.read(source, copies)
    while (status := transport.poll(read_id)) is ReadStatus.PENDING:
        pass
    return status


def test_pages_of_another_process_arrive_and_its_death_is_noticed(folder: Path) -> None:
    memory = create_pool(folder / "reader", POOL_BYTES)
    reader = SharedMemoryTransport(folder / "reader", max_poll_bytes=4096)
    reader.register(memory)
    with child_process(own_a_pool, folder / "owner", POOL_BYTES, SEED) as owner:
        source = description(owner.receive())
        assert drain(reader, source, [PageCopy(0, 4096, POOL_BYTES - 4096)]) is ReadStatus.DONE
        assert np.array_equal(memory[4096:], pattern(POOL_BYTES, SEED)[:-4096])
        assert not memory[:4096].any()

        read_id = reader.read(source, [PageCopy(0, 0, POOL_BYTES)])
        assert reader.poll(read_id) is ReadStatus.PENDING
        owner.connection.send("unlink")
        assert owner.receive() == "unlinked"
        assert reader.poll(read_id) is ReadStatus.FAILED
        with pytest.raises(PeerError, match="cannot be opened"):
            reader.read(source, [PageCopy(0, 0, 1)])


def test_a_killed_owners_pool_can_be_read_without_harm_until_its_file_is_swept(folder: Path) -> None:
    """Whether such bytes may be trusted is the settle's to say, and a dead owner answers none."""
    memory = create_pool(folder / "reader", POOL_BYTES)
    reader = SharedMemoryTransport(folder / "reader", max_poll_bytes=4096)
    reader.register(memory)
    with child_process(own_a_pool, folder / "owner", POOL_BYTES, SEED) as owner:
        source = description(owner.receive())
        read_id = reader.read(source, [PageCopy(0, 0, POOL_BYTES)])
        reader.poll(read_id)
        owner.process.kill()
        owner.process.join(30.0)
        while (status := reader.poll(read_id)) is ReadStatus.PENDING:
            pass
    assert status is ReadStatus.DONE
    (folder / "owner").unlink()
    with pytest.raises(PeerError, match="cannot be opened"):
        reader.read(source, [PageCopy(0, 0, 1)])


def test_a_reader_that_ends_leaves_the_owners_pool_alone(folder: Path) -> None:
    memory = create_pool(folder / "owner", POOL_BYTES)
    memory[:] = pattern(POOL_BYTES, SEED)
    owner = SharedMemoryTransport(folder / "owner")
    owner.register(memory)
    with child_process(read_all_and_exit, folder / "reader", owner.describe(), POOL_BYTES) as reader:
        report = reader.receive()
        reader.process.join(30.0)
        assert reader.process.exitcode == 0
    assert isinstance(report, ReaderReport)
    assert report.pid != os.getpid()
    assert report.status is ReadStatus.DONE
    assert report.received == memory.tobytes() == pattern(POOL_BYTES, SEED).tobytes()
    assert (folder / "owner").stat().st_size == POOL_BYTES
