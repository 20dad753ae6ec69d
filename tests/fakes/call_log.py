"""Stands between a scheduler and its real manager: logs every call, and raises at a chosen one."""

from collections.abc import Callable
from typing import Any

from manager import KVCacheManager, Transaction

READS = frozenset(
    {"availability", "has_cache", "is_suspended", "history_length", "capacity", "stats", "snapshot", "audit"}
)


class Injected(Exception):  # noqa: N818 -- a fault of the test, not an error of the program
    """Raised at the chosen call."""


class CallLog:
    """Passes every call on; transactions are wrapped as well, so that their calls count too.

    Attributes:
        calls: names of the calls that may change something, in order.
        raise_at: index among `calls` of the call that raises instead of acting, once.
    """

    def __init__(self, manager: KVCacheManager) -> None:
        """Log only, until `raise_at` is set."""
        self._manager = manager
        self.calls: list[str] = []
        self.raise_at: int | None = None

    def note(self, name: str) -> None:
        """Count one call; raise when it is the chosen one."""
        self.calls.append(name)
        if self.raise_at is not None and len(self.calls) - 1 == self.raise_at:
            self.raise_at = None
            raise Injected(name)

    def __getattr__(self, name: str) -> Any:
        """The manager's, counted."""
        target = getattr(self._manager, name)
        if name in READS or not callable(target):
            return target

        def counted(*args: object, **kwargs: object) -> object:
            self.note(name)
            answer = target(*args, **kwargs)
            return LoggedTransaction(answer, self.note) if name.startswith("begin_") else answer

        return counted


class LoggedTransaction:
    """A transaction whose marks are counted calls; rollbacks are never made to fail."""

    def __init__(self, transaction: Transaction, note: Callable[[str], None]) -> None:
        """Wrap an open transaction."""
        self._transaction = transaction
        self._note = note

    def commit(self) -> None:
        """Publish, or fail as a real one would: undone."""
        try:
            self._note("commit")
        except Injected:
            self._transaction.rollback()
            raise
        self._transaction.commit()

    def rollback(self) -> None:
        """Undo."""
        self._transaction.rollback()

    def savepoint(self) -> object:
        """Mark."""
        self._note("savepoint")
        return self._transaction.savepoint()

    def rollback_to(self, savepoint: Any) -> None:
        """Undo to a mark."""
        self._note("rollback_to")
        self._transaction.rollback_to(savepoint)
