"""The transfer window: how many bytes may be on their way to this worker at once (C1b, C2).

The window is part of the same attempt as the pages: an offer that the window refuses leaves no page
behind, and one that the pages refuse leaves no byte taken.
"""

from typing import Protocol

from manager import RequestId


class TransferWindow(Protocol):
    """Bytes in flight, per receiving request."""

    def try_take(self, request_id: RequestId, num_bytes: int) -> bool:
        """Take `num_bytes` for a transfer, or nothing. Taking twice for one request is a ValueError."""
        ...

    def release(self, request_id: RequestId) -> None:
        """The transfer is over or never began. Releasing an unknown request changes nothing."""
        ...

    @property
    def available_bytes(self) -> int:
        """Bytes that `try_take` would still give, oversized transfers apart."""
        ...


class TransferAdmission:
    """A window of a fixed number of bytes; one transfer larger than it goes alone when nothing moves."""

    __slots__ = ("_limit_bytes", "_taken", "_taken_bytes")

    def __init__(self, limit_bytes: int | None) -> None:
        """`limit_bytes` None means no limit."""
        self._limit_bytes = limit_bytes
        self._taken: dict[RequestId, int] = {}
        self._taken_bytes = 0

    def try_take(self, request_id: RequestId, num_bytes: int) -> bool:
        """Take `num_bytes` for a transfer, or nothing. Taking twice for one request is a ValueError."""
        if request_id in self._taken:
            msg = f"{request_id} already has {self._taken[request_id]} bytes of the transfer window"
            raise ValueError(msg)
        if self._taken_bytes and num_bytes > self.available_bytes:
            return False
        self._taken[request_id] = num_bytes
        self._taken_bytes += num_bytes
        return True

    def release(self, request_id: RequestId) -> None:
        """The transfer is over or never began. Releasing an unknown request changes nothing."""
        self._taken_bytes -= self._taken.pop(request_id, 0)

    @property
    def available_bytes(self) -> int:
        """Bytes that `try_take` would still give, oversized transfers apart; never negative."""
        if self._limit_bytes is None:
            return 1 << 62
        return max(0, self._limit_bytes - self._taken_bytes)

    @property
    def taken_bytes(self) -> int:
        """Bytes in flight."""
        return self._taken_bytes
