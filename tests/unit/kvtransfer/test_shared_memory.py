"""What is special to pool files: which file is mapped, for how long, and that it is never the wrong one."""

import dataclasses
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvtransfer.errors import PeerError, TransferLogicError
from kvtransfer.messages import MemoryDescription, PageCopy, ReadStatus
from kvtransfer.transports.shared_memory import SharedMemoryTransport, create_pool

SIZE = 8192


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="pdserve-test-") as name:
        yield Path(name)


def make_side(folder: Path, name: str, value: int = 0) -> SharedMemoryTransport:
    path = folder / name
    memory = create_pool(path, SIZE)
    memory.fill(value)
    transport = SharedMemoryTransport(path)
    transport.register(memory)
    return transport


def with_attribute(source: MemoryDescription, name: str, value: str | int) -> MemoryDescription:
    return dataclasses.replace(source, attributes={**source.attributes, name: value})


def test_a_pool_is_zeroed_shared_through_its_file_and_created_once(folder: Path) -> None:
    memory = create_pool(folder / "pool", SIZE)
    assert not memory.any()
    memory[5] = 77
    assert (folder / "pool").read_bytes()[5] == 77
    with pytest.raises(FileExistsError):
        create_pool(folder / "pool", SIZE)


def test_a_pool_that_does_not_fit_leaves_no_file(folder: Path) -> None:
    free_bytes = os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize
    with pytest.raises(OSError, match="space"):
        create_pool(folder / "huge", 2 * free_bytes)
    assert not (folder / "huge").exists()


def test_a_peer_is_mapped_once_and_read_only(folder: Path) -> None:
    owner, reader = make_side(folder, "owner", 3), make_side(folder, "reader")
    for _ in range(3):
        read_id = reader.read(owner.describe(), [PageCopy(0, 0, 16)])
        assert reader.poll(read_id) is ReadStatus.DONE
    assert reader.num_mappings == 1
    assert not reader._mappings[str(folder / "owner")].memory.flags.writeable


def test_the_mapping_of_a_file_that_is_gone_is_dropped_at_the_next_read(folder: Path) -> None:
    first, second, reader = (make_side(folder, name) for name in ("first", "second", "reader"))
    for owner in (first, second):
        reader.poll(reader.read(owner.describe(), [PageCopy(0, 0, 16)]))
    assert reader.num_mappings == 2
    (folder / "first").unlink()
    reader.poll(reader.read(second.describe(), [PageCopy(0, 0, 16)]))
    assert reader.num_mappings == 1


def test_a_replaced_file_is_refused_under_its_old_description(folder: Path) -> None:
    owner, reader = make_side(folder, "owner", 3), make_side(folder, "reader")
    old = owner.describe()
    # The old file lives on under another name, so that its inode cannot be given to the new one.
    (folder / "owner").rename(folder / "kept")
    make_side(folder, "owner", 4)
    with pytest.raises(PeerError, match="was replaced"):
        reader.read(old, [PageCopy(0, 0, 16)])


def test_a_file_replaced_in_the_middle_of_a_read_fails_it(folder: Path) -> None:
    owner = make_side(folder, "owner", 3)
    reader = SharedMemoryTransport(folder / "reader", max_poll_bytes=1024)
    reader.register(create_pool(folder / "reader", SIZE))
    read_id = reader.read(owner.describe(), [PageCopy(0, 0, SIZE)])
    assert reader.poll(read_id) is ReadStatus.PENDING
    (folder / "owner").rename(folder / "kept")
    make_side(folder, "owner", 4)
    assert reader.poll(read_id) is ReadStatus.FAILED
    assert "was replaced" in reader.error(read_id)


def test_the_pool_of_another_host_is_refused_though_its_path_exists_here(folder: Path) -> None:
    owner, reader = make_side(folder, "owner"), make_side(folder, "reader")
    with pytest.raises(PeerError, match="another host"):
        reader.read(with_attribute(owner.describe(), "boot_id", "elsewhere"), [PageCopy(0, 0, 16)])


def test_a_file_smaller_than_described_is_refused(folder: Path) -> None:
    owner, reader = make_side(folder, "owner"), make_side(folder, "reader")
    with pytest.raises(PeerError, match="shrunk"):
        reader.read(with_attribute(owner.describe(), "num_bytes", SIZE + 1), [PageCopy(0, 0, 16)])
    assert reader.num_mappings == 0


def test_a_path_that_cannot_be_mapped_is_refused(folder: Path) -> None:
    reader = make_side(folder, "reader")
    status = folder.stat()
    source = with_attribute(reader.describe(), "path", str(folder))
    source = with_attribute(with_attribute(source, "inode", status.st_ino), "device", status.st_dev)
    with pytest.raises(PeerError, match="cannot be mapped"):
        reader.read(with_attribute(source, "num_bytes", 1), [PageCopy(0, 0, 1)])


@pytest.mark.parametrize("num_bytes", [0, -1])
def test_a_description_of_no_bytes_is_refused(folder: Path, num_bytes: int) -> None:
    owner, reader = make_side(folder, "owner"), make_side(folder, "reader")
    with pytest.raises(PeerError, match="not a description"):
        reader.read(with_attribute(owner.describe(), "num_bytes", num_bytes), [])


def test_memory_without_its_file_or_of_another_size_cannot_be_registered(folder: Path) -> None:
    memory = np.zeros(SIZE, dtype=np.uint8)
    with pytest.raises(TransferLogicError, match="must exist"):
        SharedMemoryTransport(folder / "missing").register(memory)
    create_pool(folder / "pool", SIZE)
    with pytest.raises(TransferLogicError, match=f"{SIZE} bytes"):
        SharedMemoryTransport(folder / "pool").register(memory[:-1])


def test_no_descriptor_and_no_mapping_is_left_behind(folder: Path) -> None:
    owner, reader = make_side(folder, "owner", 3), make_side(folder, "reader")
    before = len(list(Path("/proc/self/fd").iterdir()))
    reader.poll(reader.read(owner.describe(), [PageCopy(0, 0, 16)]))
    reader.close()
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    assert Path("/proc/self/maps").read_text().count(str(folder / "owner")) == 1
