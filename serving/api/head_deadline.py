"""Connections on which no request comes: closed after a while, since each of them holds a file descriptor.

uvicorn waits without end for a request's head, on a new connection and on one that has sent a first byte of its next
request. Bodies have a deadline of their own (`body.py`), and a connection between two requests has uvicorn's.
"""

import asyncio
from typing import ClassVar

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol


class HeadDeadlineProtocol(H11Protocol):
    """uvicorn's HTTP/1.1 connection, closed when a request's head does not arrive in time.

    Attributes:
        head_timeout_s: from the connection, or from the head's first byte, to its last.
    """

    head_timeout_s: ClassVar[float] = 20.0

    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has connected."""
        super().connection_made(transport)
        self._await_head()

    def data_received(self, data: bytes) -> None:
        """Some bytes came."""
        super().data_received(data)
        if self.conn.their_state is h11.IDLE:
            self._await_head()
        else:
            self._stop_waiting()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone."""
        self._stop_waiting()
        super().connection_lost(exc)

    def _await_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self.head_timeout_s, self.timeout_keep_alive_handler)

    def _stop_waiting(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
