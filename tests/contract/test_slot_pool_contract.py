"""One suite over every `SlotPool`, and over the thread that copies between them."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from manager import CacheConfigError, CopyFailedError
from manager.pools.base import SlotCopy, SlotPool
from manager.pools.copy_threads import CopyThread
from manager.pools.disk_pools import DiskPool
from manager.pools.numpy_pools import NumpyPool
from manager.pools.torch_pools import TorchPool

SLOTS, BYTES = 5, 24


@pytest.fixture(params=["numpy", "torch", "disk"])
def pool(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SlotPool]:
    made: SlotPool
    match request.param:
        case "numpy":
            made = NumpyPool(SLOTS, BYTES)
        case "torch":
            made = TorchPool(SLOTS, BYTES)
        case _:
            made = DiskPool(SLOTS, BYTES, str(tmp_path))
    yield made
    made.close()
    made.close()


def test_a_slot_gives_back_what_was_written_and_others_are_untouched(pool: SlotPool) -> None:
    assert (pool.num_slots, pool.slot_bytes) == (SLOTS, BYTES)
    source = np.arange(BYTES, dtype=np.uint8)
    pool.write(3, source)
    for slot in range(SLOTS):
        out = np.full(BYTES, 9, np.uint8)
        pool.read(slot, out)
        assert np.array_equal(out, source if slot == 3 else np.zeros(BYTES, np.uint8))


def test_copies_go_through_every_pool_in_order(pool: SlotPool) -> None:
    host = NumpyPool(SLOTS, BYTES)
    host.write(0, np.full(BYTES, 5, np.uint8))
    thread = CopyThread([pool, host])
    thread.stage([SlotCopy(1, 0, 0, 2)])
    thread.fill([SlotCopy(0, 2, 0, 4), SlotCopy(0, 4, 1, 3)])
    assert thread.wait() == []
    out = np.zeros(BYTES, np.uint8)
    host.read(3, out)
    assert (out == 5).all()
    thread.close()
    thread.close()


def test_a_disk_pool_leaves_no_file(tmp_path: Path) -> None:
    pool = DiskPool(SLOTS, BYTES, str(tmp_path))
    assert not list(tmp_path.iterdir())
    pool.close()


def test_a_disk_pool_without_its_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CacheConfigError, match="5 slots of 24 bytes"):
        DiskPool(SLOTS, BYTES, str(tmp_path / "missing"))


def test_a_closed_file_fails_the_stage_and_is_reported_for_fills(tmp_path: Path) -> None:
    disk, host = DiskPool(SLOTS, BYTES, str(tmp_path)), NumpyPool(SLOTS, BYTES)

    class Broken(NumpyPool):
        def write(self, slot: int, source: object) -> None:
            raise OSError(28, "No space left on device")

    thread = CopyThread([host, Broken(SLOTS, BYTES)])
    with pytest.raises(CopyFailedError, match="copy into store 1 failed"):
        thread.stage([SlotCopy(0, 0, 1, 0)])
    thread.fill([SlotCopy(0, 0, 0, 1), SlotCopy(0, 0, 1, 1)])
    assert thread.wait() == [SlotCopy(0, 0, 1, 1)]
    assert thread.wait() == []
    thread.close()
    disk.close()
