"""The contract of `kvtransfer.transports.base.Transport`, over every transport and the fake one."""

import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtransfer.errors import PeerError, TransferLogicError
from kvtransfer.messages import MemoryDescription, PageCopy, ReadStatus
from kvtransfer.transports import nixl
from kvtransfer.transports.base import ReadId, Transport
from tests.contract.object_keeper import running_keeper
from tests.contract.transport_harness import POLL_BYTES, POOL_BYTES, Harness, Side, type_of_memory

PATIENCE_S = 30.0


def pattern(memory: type_of_memory) -> None:
    memory[:] = np.random.default_rng(11).integers(0, 256, memory.size, dtype=np.uint8)


def needs_nixl(kind: str) -> object:
    reason = nixl.why_unavailable()
    return pytest.param(kind, marks=pytest.mark.skipif(bool(reason), reason=reason))


@pytest.fixture(scope="module")
def keeper() -> Iterator[Any]:
    """A Ray actor: what the object store transport asks."""
    with tempfile.TemporaryDirectory(prefix="pdserve-test-") as folder, running_keeper(Path(folder)) as actor:
        yield actor


@pytest.fixture(
    params=[
        "inprocess",
        "shared_memory",
        "auto",
        "gated",
        "collective",
        needs_nixl("nixl"),
        pytest.param("object_store", marks=pytest.mark.ray),
    ]
)
def harness(request: pytest.FixtureRequest) -> Iterator[Harness]:
    keeper = request.getfixturevalue("keeper") if request.param == "object_store" else None
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm", prefix="pdserve-test-"))
        yield Harness(request.param, Path(folder), stack, keeper)


@pytest.fixture
def owner(harness: Harness) -> Side:
    return harness.registered("owner", pattern)


@pytest.fixture
def reader(harness: Harness) -> Side:
    return harness.registered("reader")


def drain(transport: Transport, read_id: ReadId) -> ReadStatus:
    end_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < end_s:
        status = transport.poll(read_id)
        if status is not ReadStatus.PENDING:
            return status
        if not transport.is_moving:
            time.sleep(0.0005)
    pytest.fail("the read does not end")


def is_refused(transport: Transport, source: MemoryDescription, copies: list[PageCopy]) -> bool:
    """Whether a read brings nothing: at once, or, where the transport asks the other side first, by failing."""
    try:
        read_id = transport.read(source, copies)
    except PeerError:
        return True
    return drain(transport, read_id) is ReadStatus.FAILED


def test_a_read_brings_exactly_the_named_bytes_and_touches_no_others(owner: Side, reader: Side) -> None:
    copies = [PageCopy(0, 1024, 64), PageCopy(2048, 0, 700), PageCopy(100, 4000, 96)]
    expected = np.zeros(POOL_BYTES, dtype=np.uint8)
    for copy in copies:
        source = owner.memory[copy.source_offset : copy.source_offset + copy.num_bytes]
        expected[copy.destination_offset : copy.destination_offset + copy.num_bytes] = source
    before = owner.memory.copy()
    read_id = reader.transport.read(owner.transport.describe(), copies)
    assert drain(reader.transport, read_id) is ReadStatus.DONE
    assert np.array_equal(reader.memory, expected)
    assert np.array_equal(owner.memory, before)


def test_bytes_are_counted_where_they_move_cancelled_reads_included(owner: Side, reader: Side) -> None:
    source = owner.transport.describe()
    assert reader.transport.bytes_moved == 0
    copies = [PageCopy(0, 1024, 64), PageCopy(2048, 0, 700), PageCopy(100, 4000, 96)]
    assert drain(reader.transport, reader.transport.read(source, copies)) is ReadStatus.DONE
    assert reader.transport.bytes_moved == 860
    cancelled = reader.transport.read(source, [PageCopy(0, 0, 2 * POLL_BYTES)])
    while reader.transport.bytes_moved == 860:
        assert reader.transport.poll(cancelled) is ReadStatus.PENDING
    reader.transport.cancel(cancelled)
    drain(reader.transport, cancelled)
    assert 860 + POLL_BYTES <= reader.transport.bytes_moved <= 860 + 2 * POLL_BYTES
    assert owner.transport.bytes_moved == 0


def test_a_read_of_the_whole_memory_brings_all_of_it(owner: Side, reader: Side) -> None:
    read_id = reader.transport.read(owner.transport.describe(), [PageCopy(0, 0, POOL_BYTES)])
    assert drain(reader.transport, read_id) is ReadStatus.DONE
    assert np.array_equal(reader.memory, owner.memory)


def test_a_read_of_nothing_is_done(owner: Side, reader: Side) -> None:
    assert drain(reader.transport, reader.transport.read(owner.transport.describe(), [])) is ReadStatus.DONE
    assert not reader.memory.any()


def test_a_long_read_is_pending_before_it_is_done(owner: Side, reader: Side) -> None:
    read_id = reader.transport.read(owner.transport.describe(), [PageCopy(0, 0, 3 * POLL_BYTES)])
    assert reader.transport.poll(read_id) is ReadStatus.PENDING
    assert drain(reader.transport, read_id) is ReadStatus.DONE


def test_several_reads_at_once_each_bring_their_own_bytes(owner: Side, reader: Side) -> None:
    source = owner.transport.describe()
    reads = [reader.transport.read(source, [PageCopy(k * 600, k * 600, 600)]) for k in range(4)]
    pending = set(reads)
    end_s = time.monotonic() + PATIENCE_S
    while pending and time.monotonic() < end_s:
        ended = {read_id for read_id in pending if reader.transport.poll(read_id) is ReadStatus.DONE}
        pending -= ended
    assert not pending
    assert np.array_equal(reader.memory[:2400], owner.memory[:2400])
    assert not reader.memory[2400:].any()


def test_two_owners_are_told_apart(harness: Harness, owner: Side, reader: Side) -> None:
    other = harness.registered("other", lambda memory: memory.fill(9))
    first = reader.transport.read(owner.transport.describe(), [PageCopy(0, 0, 100)])
    second = reader.transport.read(other.transport.describe(), [PageCopy(0, 100, 100)])
    assert drain(reader.transport, second) is ReadStatus.DONE
    assert drain(reader.transport, first) is ReadStatus.DONE
    assert np.array_equal(reader.memory[:100], owner.memory[:100])
    assert (reader.memory[100:200] == 9).all()


@pytest.mark.parametrize(
    "copy",
    [
        PageCopy(POOL_BYTES - 10, 0, 11),
        PageCopy(0, POOL_BYTES - 10, 11),
        PageCopy(-1, 0, 8),
        PageCopy(0, -1, 8),
        PageCopy(0, 0, -8),
    ],
)
def test_a_run_outside_either_memory_is_refused_before_any_byte_moves(
    owner: Side, reader: Side, copy: PageCopy
) -> None:
    with pytest.raises(PeerError, match="leaves the"):
        reader.transport.read(owner.transport.describe(), [PageCopy(0, 0, 64), copy])
    assert not reader.memory.any()


def test_a_cancelled_read_writes_nothing_after_it_said_so(owner: Side, reader: Side) -> None:
    read_id = reader.transport.read(owner.transport.describe(), [PageCopy(0, 0, POOL_BYTES)])
    assert reader.transport.poll(read_id) is ReadStatus.PENDING
    reader.transport.cancel(read_id)
    assert drain(reader.transport, read_id) is ReadStatus.CANCELLED
    written = reader.memory.copy()
    assert not np.array_equal(written, owner.memory)
    other = reader.transport.read(owner.transport.describe(), [])
    drain(reader.transport, other)
    assert np.array_equal(reader.memory, written)


def test_cancelling_twice_or_after_the_end_is_ignored(owner: Side, reader: Side) -> None:
    read_id = reader.transport.read(owner.transport.describe(), [PageCopy(0, 0, POOL_BYTES)])
    reader.transport.cancel(read_id)
    reader.transport.cancel(read_id)
    assert drain(reader.transport, read_id) is ReadStatus.CANCELLED
    reader.transport.cancel(read_id)


def test_one_cancelled_read_leaves_another_alone(owner: Side, reader: Side) -> None:
    source = owner.transport.describe()
    first = reader.transport.read(source, [PageCopy(0, 0, 1024)])
    second = reader.transport.read(source, [PageCopy(1024, 1024, 1024)])
    reader.transport.cancel(first)
    assert drain(reader.transport, first) is ReadStatus.CANCELLED
    assert drain(reader.transport, second) is ReadStatus.DONE
    assert np.array_equal(reader.memory[1024:2048], owner.memory[1024:2048])


@pytest.mark.parametrize("ending", ["done", "cancelled"])
def test_an_ended_read_is_forgotten(owner: Side, reader: Side, ending: str) -> None:
    read_id = reader.transport.read(owner.transport.describe(), [PageCopy(0, 0, 8)])
    if ending == "cancelled":
        reader.transport.cancel(read_id)
    assert drain(reader.transport, read_id).value == ending
    with pytest.raises(TransferLogicError, match="unknown or has ended"):
        reader.transport.poll(read_id)


def test_a_read_whose_owner_dies_in_the_middle_fails_with_a_reason(owner: Side, reader: Side) -> None:
    read_id = reader.transport.read(owner.transport.describe(), [PageCopy(0, 0, POOL_BYTES)])
    assert reader.transport.poll(read_id) is ReadStatus.PENDING
    owner.die()
    assert drain(reader.transport, read_id) is ReadStatus.FAILED
    assert "gone" in reader.transport.error(read_id)
    assert reader.transport.error(ReadId(read_id + 1)) == ""
    with pytest.raises(TransferLogicError):
        reader.transport.poll(read_id)


def test_a_dead_owner_cannot_be_read(owner: Side, reader: Side) -> None:
    source = owner.transport.describe()
    owner.die()
    assert is_refused(reader.transport, source, [PageCopy(0, 0, 8)])
    assert not reader.memory.any()


def test_a_description_of_an_earlier_life_is_refused_and_the_new_one_works(
    harness: Harness, owner: Side, reader: Side
) -> None:
    earlier = owner.transport.describe()
    drain(reader.transport, reader.transport.read(earlier, [PageCopy(0, 0, 8)]))
    owner.die()
    reborn = harness.registered("owner", lambda memory: memory.fill(5))
    reader.memory.fill(0)
    assert is_refused(reader.transport, earlier, [PageCopy(0, 0, 8)])
    assert not reader.memory.any()
    read_id = reader.transport.read(reborn.transport.describe(), [PageCopy(0, 0, 8)])
    assert drain(reader.transport, read_id) is ReadStatus.DONE
    assert (reader.memory[:8] == 5).all()


@pytest.mark.parametrize("transport", ["another", "same"])
def test_a_foreign_or_malformed_description_is_refused(reader: Side, transport: str) -> None:
    name = reader.transport.describe().transport if transport == "same" else transport
    with pytest.raises(PeerError, match="not a description"):
        reader.transport.read(MemoryDescription(name, {}), [PageCopy(0, 0, 8)])


def test_describing_or_reading_before_register_is_a_bug_of_ours(harness: Harness, owner: Side) -> None:
    bare = harness.side("bare")
    with pytest.raises(TransferLogicError, match="regist"):
        bare.transport.describe()
    with pytest.raises(TransferLogicError, match="regist"):
        bare.transport.read(owner.transport.describe(), [])


def test_registering_twice_is_a_bug_of_ours(owner: Side) -> None:
    with pytest.raises(TransferLogicError, match="already"):
        owner.transport.register(owner.memory)


def test_only_plain_writable_bytes_can_be_registered(harness: Harness) -> None:
    bare = harness.side("bare")
    frozen = bare.memory.copy()
    frozen.flags.writeable = False
    for wrong in (bare.memory.reshape(64, 64), bare.memory[::2], frozen, bare.memory.view(np.int8)):
        with pytest.raises(TransferLogicError, match="1-D"):
            bare.transport.register(wrong)  # type: ignore[arg-type]
    bare.transport.register(bare.memory)


def test_closing_twice_is_allowed(owner: Side, reader: Side) -> None:
    reader.transport.read(owner.transport.describe(), [PageCopy(0, 0, 8)])
    reader.transport.close()
    reader.transport.close()


def test_a_description_does_not_change(owner: Side) -> None:
    assert owner.transport.describe() == owner.transport.describe()
    assert owner.transport.describe().transport == owner.transport.name


@pytest.mark.ray
def test_pages_of_a_killed_actor_are_gone_though_ray_starts_it_again(keeper: Any) -> None:
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm", prefix="pdserve-test-"))
        harness = Harness("object_store", Path(folder), stack, keeper)
        owner, reader = harness.registered("owner", pattern), harness.registered("reader")
        read_id = reader.transport.read(owner.transport.describe(), [PageCopy(0, 0, POOL_BYTES)])
        assert reader.transport.poll(read_id) is ReadStatus.PENDING
        keeper.die.remote()
        assert drain(reader.transport, read_id) is ReadStatus.FAILED
        assert "gone" in reader.transport.error(read_id)
        reborn = harness.registered("reborn", pattern)
        assert is_refused(reader.transport, owner.transport.describe(), [PageCopy(0, 0, 8)])
        again = reader.transport.read(reborn.transport.describe(), [PageCopy(0, 0, POOL_BYTES)])
        assert drain(reader.transport, again) is ReadStatus.DONE
        assert np.array_equal(reader.memory, owner.memory)
