"""`BestTransport`: several transports over one memory; each read takes the best that reaches the peer.

A description of it lists every way to the memory. The reader tries its own transports in its order of preference:
the first one of which the peer has a description, and whose `read` does not say `PeerUnreachable`, is used. Once
a read runs it stays with its transport: a failure in the middle is the request's to repeat.

What was chosen for whom, and why not something better, is in `choices` and, when it changes, in the log.
"""

import logging
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from kvtransfer.errors import PeerError, PeerUnreachable, TransferLogicError
from kvtransfer.messages import MemoryDescription, PageCopy, ReadStatus
from kvtransfer.transports.base import ReadId, Transport
from kvtransfer.transports.description import attribute

_NAME = "auto"
_log = logging.getLogger(__name__)


class BestTransport:
    """A `Transport` that picks one for each read.

    Args:
        transports: best first; at least one, none registered yet.
        life_name: ours, in descriptions and in the peers' choices: `<worker>.<epoch>`.
    """

    def __init__(self, transports: Sequence[Transport], life_name: str) -> None:
        """Start without memory."""
        if not transports:
            msg = f"{life_name} has no transport"
            raise TransferLogicError(msg)
        self._transports = tuple(transports)
        self._life_name = life_name
        self._description: MemoryDescription | None = None
        self._reads: dict[ReadId, tuple[Transport, ReadId]] = {}
        self._next_id = 0
        self._last_error: tuple[ReadId, str] | None = None
        self._choices: dict[str, str] = {}

    @property
    def name(self) -> str:
        """As in `TransferConfig.transport`."""
        return _NAME

    @property
    def choices(self) -> Mapping[str, str]:
        """For each worker that was read from: the transport, and what was wrong with every better one."""
        return dict(self._choices)

    @property
    def copies_in_poll(self) -> bool:
        """Whether all of them do."""
        return all(transport.copies_in_poll for transport in self._transports)

    @property
    def is_moving(self) -> bool:
        """Whether one that has a read is."""
        return any(transport.is_moving for transport in {transport for transport, _ in self._reads.values()})

    @property
    def needs_serving(self) -> bool:
        """Whether one of them does."""
        return any(transport.needs_serving for transport in self._transports)

    @property
    def bytes_moved(self) -> int:
        """Bytes of all of them."""
        return sum(transport.bytes_moved for transport in self._transports)

    def register(self, memory: npt.NDArray[np.uint8]) -> None:
        """Register with all of them. Once."""
        for transport in self._transports:
            transport.register(memory)
        ways = tuple(transport.describe() for transport in self._transports)
        self._description = MemoryDescription(_NAME, {"life": self._life_name}, ways)

    def describe(self) -> MemoryDescription:
        """Every way to our memory."""
        if self._description is None:
            msg = f"{self._life_name} has no registered memory"
            raise TransferLogicError(msg)
        return self._description

    def read(self, source: MemoryDescription, copies: Sequence[PageCopy]) -> ReadId:
        """Start a read with the best transport. Raises PeerError when none reaches the peer, or what it raises."""
        self.describe()
        life = attribute(source, _NAME, "life", str)
        if not source.ways:
            msg = f"{life} describes no way to its memory"
            raise PeerError(msg)
        transport, read_id, reasons = self._start(source.ways, copies)
        self._note(life, transport, reasons)
        self._next_id += 1
        own_id = ReadId(self._next_id)
        self._reads[own_id] = (transport, read_id)
        return own_id

    def poll(self, read_id: ReadId) -> ReadStatus:
        """Of the transport that was chosen."""
        transport, inner = self._find(read_id)
        status = transport.poll(inner)
        if status is ReadStatus.FAILED:
            self._last_error = (read_id, transport.error(inner))
        if status is not ReadStatus.PENDING:
            del self._reads[read_id]
        return status

    def error(self, read_id: ReadId) -> str:
        """Why the last read that failed did, if it was `read_id`."""
        return self._last_error[1] if self._last_error and self._last_error[0] == read_id else ""

    def serve(self) -> None:
        """Give all of them a turn."""
        for transport in self._transports:
            transport.serve()

    def cancel(self, read_id: ReadId) -> None:
        """Of the transport that was chosen; an ended read is left alone."""
        if read_id in self._reads:
            transport, inner = self._reads[read_id]
            transport.cancel(inner)

    def close(self) -> None:
        """Close all of them; may be called twice."""
        self._reads.clear()
        for transport in self._transports:
            transport.close()

    def _find(self, read_id: ReadId) -> tuple[Transport, ReadId]:
        if read_id not in self._reads:
            msg = f"read {read_id} is unknown or has ended"
            raise TransferLogicError(msg)
        return self._reads[read_id]

    def _start(
        self, ways: Sequence[MemoryDescription], copies: Sequence[PageCopy]
    ) -> tuple[Transport, ReadId, tuple[str, ...]]:
        by_name = {way.transport: way for way in ways}
        reasons: list[str] = []
        for transport in self._transports:
            way = by_name.get(transport.name)
            if way is None:
                reasons.append(f"{transport.name}: the peer has none")
                continue
            try:
                return transport, transport.read(way, copies), tuple(reasons)
            except PeerUnreachable as error:
                reasons.append(f"{transport.name}: {error}")
        msg = f"no transport reaches the peer, which has {sorted(by_name)}: {'; '.join(reasons)}"
        raise PeerError(msg)

    def _note(self, life: str, transport: Transport, reasons: tuple[str, ...]) -> None:
        # By worker, not by life: what was chosen for its last one is no longer of interest.
        peer = life.rpartition(".")[0] or life
        text = f"{transport.name} ({'; '.join(reasons) or 'the first choice'})"
        if self._choices.get(peer) != text:
            self._choices[peer] = text
            _log.info("%s reads from %s over %s", self._life_name, life, text)
