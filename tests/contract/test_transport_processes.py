"""Network transports between real processes: bytes, cancels, and owners that are killed in the middle of a read."""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from kvtransfer.messages import MemoryDescription, ReadStatus
from kvtransfer.transports import nixl
from tests.contract.pool_owner import Child, child_process, pattern
from tests.contract.remote_owner import BATCH_BYTES, ReadReport, read_and_tell, serve_a_pool

POOL_BYTES = 16 * BATCH_BYTES
SEED = 8

needs_nixl = pytest.mark.skipif(bool(nixl.why_unavailable()), reason=nixl.why_unavailable() or "it is here")


class Ends:
    """A reader, and as many owners as the test wants."""

    def __init__(self, stack: ExitStack, kind: str) -> None:
        self._stack = stack
        self._kind = kind
        self._num_owners = 0
        self.reader = stack.enter_context(child_process(read_and_tell, kind, POOL_BYTES, SEED))

    def owner(self, seed: int) -> tuple[Child, MemoryDescription]:
        self._num_owners += 1
        name = f"owner.{self._num_owners}"
        child = self._stack.enter_context(child_process(serve_a_pool, self._kind, name, POOL_BYTES, seed))
        source = child.receive()
        assert isinstance(source, MemoryDescription)
        return child, source

    def start(self, source: MemoryDescription) -> None:
        self.reader.connection.send(source)
        assert self.reader.receive() == "started"

    def end(self, word: str) -> ReadReport:
        self.reader.connection.send(word)
        report = self.reader.receive()
        assert isinstance(report, ReadReport)
        assert report.late_bytes == 0
        return report


@pytest.fixture(
    params=[
        pytest.param(("collective", ""), id="collective", marks=pytest.mark.slow),
        pytest.param(("nixl", ""), marks=needs_nixl, id="nixl"),
        pytest.param(("nixl", "tcp"), marks=[needs_nixl, pytest.mark.slow], id="nixl-tcp"),
    ]
)
def ends(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ends]:
    kind, links = request.param
    if links:
        monkeypatch.setenv("UCX_TLS", links)
    with ExitStack() as stack:
        yield Ends(stack, kind)


def test_pages_arrive_a_cancel_stops_and_a_killed_owner_fails_the_read(ends: Ends) -> None:
    """One test, since starting three processes takes longer than all that it checks."""
    assert ends.reader.receive() == "ready"
    owner, source = ends.owner(SEED)
    ends.start(source)
    whole = ends.end("go")
    assert whole.status is ReadStatus.DONE
    assert whole.received == pattern(POOL_BYTES, SEED).tobytes()
    assert whole.num_moved == POOL_BYTES

    ends.start(source)
    cancelled = ends.end("cancel")
    assert cancelled.status is ReadStatus.CANCELLED
    assert BATCH_BYTES <= cancelled.num_moved <= 2 * BATCH_BYTES
    assert cancelled.received != whole.received

    ends.start(source)
    owner.process.kill()
    owner.process.join(30.0)
    killed = ends.end("go")
    assert killed.status is ReadStatus.FAILED
    assert "gone" in killed.error
    assert killed.num_moved < POOL_BYTES

    _, reborn = ends.owner(SEED + 1)
    ends.start(reborn)
    again = ends.end("go")
    assert again.status is ReadStatus.DONE
    assert again.received == pattern(POOL_BYTES, SEED + 1).tobytes()
