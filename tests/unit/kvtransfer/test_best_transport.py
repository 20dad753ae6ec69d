"""Which of several transports a read takes, and what is said about it."""

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvtransfer.errors import PeerError, TransferLogicError
from kvtransfer.messages import MemoryDescription, PageCopy, ReadStatus
from kvtransfer.transports.base import ReadId, Transport
from kvtransfer.transports.best import BestTransport
from kvtransfer.transports.inprocess import InProcessRegistry, InProcessTransport
from kvtransfer.transports.shared_memory import SharedMemoryTransport, create_pool

POOL_BYTES = 1024
COPY = [PageCopy(0, 0, 100)]
Make = Callable[..., BestTransport]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Makes registered transports over shared memory and a registry, or fewer."""
    registry = InProcessRegistry()

    def make(name: str, *, kinds: str = "shared_memory inprocess", fill: int = 0) -> BestTransport:
        path = tmp_path / name
        memory = create_pool(path, POOL_BYTES)
        memory.fill(fill)
        by_name: dict[str, Transport] = {
            "shared_memory": SharedMemoryTransport(path),
            "inprocess": InProcessTransport(registry, name),
        }
        best = BestTransport([by_name[kind] for kind in kinds.split()], f"{name}.7")
        best.register(memory)
        return best

    return make


def elsewhere(source: MemoryDescription) -> MemoryDescription:
    """The same memory, seen from another host."""
    ways = tuple(
        replace(way, attributes={**way.attributes, "boot_id": "another"}) if "boot_id" in way.attributes else way
        for way in source.ways
    )
    return replace(source, ways=ways)


def finish(transport: BestTransport, read_id: ReadId) -> ReadStatus:
    for _ in range(10):
        if (status := transport.poll(read_id)) is not ReadStatus.PENDING:
            return status
    pytest.fail("the read does not end")


def test_the_first_choice_is_taken_where_it_reaches_the_peer(make: Make) -> None:
    owner, reader = make("owner", fill=3), make("reader")
    assert finish(reader, reader.read(owner.describe(), COPY)) is ReadStatus.DONE
    assert reader.choices == {"owner": "shared_memory (the first choice)"}
    assert reader.bytes_moved == 100


def test_another_host_is_read_over_the_next_transport_and_the_reason_is_kept(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    owner, reader = make("owner"), make("reader")
    with caplog.at_level(logging.INFO, logger="kvtransfer.transports.best"):
        for _ in range(2):
            assert finish(reader, reader.read(elsewhere(owner.describe()), COPY)) is ReadStatus.DONE
    (text,) = reader.choices.values()
    assert text.startswith("inprocess (shared_memory: ")
    assert "another host" in text
    assert [text in record.getMessage() for record in caplog.records] == [True]


def test_a_transport_that_the_peer_lacks_is_passed_over(make: Make) -> None:
    owner, reader = make("owner", kinds="inprocess"), make("reader")
    assert finish(reader, reader.read(owner.describe(), COPY)) is ReadStatus.DONE
    assert reader.choices == {"owner": "inprocess (shared_memory: the peer has none)"}


def test_without_a_common_transport_the_read_is_refused_with_every_reason(make: Make) -> None:
    owner, reader = make("owner", kinds="inprocess"), make("reader", kinds="shared_memory")
    with pytest.raises(PeerError, match=r"no transport reaches the peer, which has \['inprocess'\]: shared_memory"):
        reader.read(owner.describe(), COPY)
    with pytest.raises(PeerError, match="another host"):
        reader.read(elsewhere(make("second").describe()), [PageCopy(0, 0, POOL_BYTES + 1)])


def test_a_bad_run_is_no_reason_to_try_the_next_one(make: Make) -> None:
    owner, reader = make("owner"), make("reader")
    with pytest.raises(PeerError, match="leaves the"):
        reader.read(owner.describe(), [PageCopy(POOL_BYTES, 0, 1)])
    assert reader.choices == {}


def test_reads_over_two_transports_at_once_do_not_mix_their_numbers(make: Make) -> None:
    near, far, reader = make("near", fill=1), make("far", fill=2), make("reader")
    first = reader.read(near.describe(), [PageCopy(0, 0, 100)])
    second = reader.read(elsewhere(far.describe()), [PageCopy(0, 100, 100)])
    reader.cancel(first)
    assert finish(reader, second) is ReadStatus.DONE
    assert finish(reader, first) is ReadStatus.CANCELLED
    assert reader.bytes_moved == 100


def test_no_transport_at_all_is_a_bug_of_ours() -> None:
    with pytest.raises(TransferLogicError, match="no transport"):
        BestTransport([], "lonely.1")


def test_polls_move_bytes_only_while_a_read_runs(make: Make) -> None:
    owner, reader = make("owner"), make("reader")
    assert not reader.is_moving
    read_id = reader.read(owner.describe(), COPY)
    assert np.array([reader.is_moving, reader.copies_in_poll, not reader.needs_serving]).all()
    finish(reader, read_id)
