"""Reads through buffers: what comes late, or after the read has ended, never reaches our memory."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest

from kvtransfer.errors import PeerError
from kvtransfer.messages import MemoryDescription, PageCopy, ReadStatus
from kvtransfer.transports.runs import Run
from kvtransfer.transports.staged import NUM_AHEAD, StagedTransport, gather

SOURCE = MemoryDescription("hand")
SOURCE_BYTES = 1000
BATCH_BYTES = 100


class HandFetch:
    """A fetch that arrives when the test says so."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self.runs = runs
        self.arrived: npt.NDArray[np.uint8] | None = None
        self.error = ""
        self.num_releases = 0

    @property
    def is_ready(self) -> bool:
        return self.arrived is not None or bool(self.error)

    def take(self) -> npt.NDArray[np.uint8] | None:
        if self.error:
            raise PeerError(self.error)
        return self.arrived

    def release(self) -> None:
        self.num_releases += 1

    def arrive(self, value: int) -> None:
        self.arrived = np.full(sum(num_bytes for _, _, num_bytes in self.runs), value, dtype=np.uint8)


class HandTransport(StagedTransport):
    """Keeps every fetch that was asked for."""

    def __init__(self) -> None:
        super().__init__("hand", BATCH_BYTES)
        self.fetches: list[HandFetch] = []

    def describe(self) -> MemoryDescription:
        return SOURCE

    def _size_of(self, source: MemoryDescription) -> int:
        return SOURCE_BYTES

    def _fetch(self, source: MemoryDescription, runs: Sequence[Run]) -> HandFetch:
        assert source == SOURCE
        self.fetches.append(HandFetch(runs))
        return self.fetches[-1]


@pytest.fixture
def reads() -> HandTransport:
    transport = HandTransport()
    transport.register(np.zeros(SOURCE_BYTES, dtype=np.uint8))
    return transport


def test_no_more_is_asked_for_than_can_be_copied_soon(reads: HandTransport) -> None:
    read_id = reads.read(SOURCE, [PageCopy(0, 0, 10 * BATCH_BYTES)])
    for _ in range(5):
        assert reads.poll(read_id) is ReadStatus.PENDING
    assert len(reads.fetches) == NUM_AHEAD
    was_moving = reads.is_moving
    reads.fetches[0].arrive(1)
    assert (was_moving, reads.is_moving) == (False, True)
    reads.poll(read_id)
    assert len(reads.fetches) == NUM_AHEAD + 1
    assert reads.bytes_moved == BATCH_BYTES


def test_bytes_that_arrive_after_a_cancel_touch_nothing(reads: HandTransport) -> None:
    read_id = reads.read(SOURCE, [PageCopy(0, 0, 3 * BATCH_BYTES)])
    reads.poll(read_id)
    reads.cancel(read_id)
    assert reads.poll(read_id) is ReadStatus.CANCELLED
    for fetch in reads.fetches:
        fetch.arrive(7)
    other = reads.read(SOURCE, [PageCopy(0, 500, 10)])
    reads.poll(other)
    reads.fetches[-1].arrive(9)
    assert reads.poll(other) is ReadStatus.DONE
    assert not reads.memory[:500].any()
    assert (reads.memory[500:510] == 9).all()


def test_batches_are_put_in_their_places_in_order(reads: HandTransport) -> None:
    read_id = reads.read(SOURCE, [PageCopy(0, 900, 50), PageCopy(300, 100, 100)])
    reads.poll(read_id)
    first, second = reads.fetches
    assert (first.runs, second.runs) == ([(0, 900, 50), (300, 100, 50)], [(350, 150, 50)])
    second.arrive(2)
    assert reads.poll(read_id) is ReadStatus.PENDING
    assert not reads.memory.any()
    first.arrive(1)
    reads.poll(read_id)
    assert reads.poll(read_id) is ReadStatus.DONE
    assert (reads.memory[900:950] == 1).all()
    assert (reads.memory[100:150] == 1).all()
    assert (reads.memory[150:200] == 2).all()


def test_every_fetch_is_released_once_however_its_read_ends(reads: HandTransport) -> None:
    copies = [PageCopy(0, 0, 2 * BATCH_BYTES)]
    done, failed, cancelled, forgotten = (reads.read(SOURCE, copies) for _ in range(4))
    for read_id in (done, failed, cancelled, forgotten):
        reads.poll(read_id)
    for fetch in reads.fetches[:2]:
        fetch.arrive(1)
    reads.poll(done)
    assert reads.poll(done) is ReadStatus.DONE
    reads.fetches[2].error = "broken"
    assert reads.poll(failed) is ReadStatus.FAILED
    assert reads.error(failed) == "broken"
    reads.cancel(cancelled)
    reads.poll(cancelled)
    reads.close()
    assert [fetch.num_releases for fetch in reads.fetches] == [1] * 8


def test_an_owner_gathers_only_from_its_own_memory() -> None:
    memory = np.arange(20, dtype=np.uint8)
    assert gather(memory, [(3, 2), (10, 1), (0, 0)]).tolist() == [3, 4, 10]
    for wrong in ((-1, 2), (19, 2), (5, -1)):
        with pytest.raises(PeerError, match="a peer asks"):
            gather(memory, [(0, 1), wrong])
