"""Stands between a scheduler and its real manager: logs every call, and raises or refuses at a chosen one."""

from collections.abc import Callable
from typing import Any

from manager import KVCacheManager, Refusal, RefusalReason, RequestId, Transaction
from scheduler.admission import TransferAdmission

REFUSABLE = frozenset(
    {"prepare_context", "resize_context", "try_allocate_generation", "prepare_disagg_gen_init", "suspend_request"}
)

_REASONS = dict.fromkeys(REFUSABLE, RefusalReason.OUT_OF_PAGES) | {"suspend_request": RefusalReason.LOWER_TIERS_FULL}
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
        refuse_at: index among `calls` of the call that is refused instead of acting, once, if it can be.
        num_refused: calls refused that way so far.
    """

    def __init__(self, manager: KVCacheManager) -> None:
        """Log only, until `raise_at` is set."""
        self._manager = manager
        self.calls: list[str] = []
        self.raise_at: int | None = None
        self.refuse_at: int | None = None
        self.num_refused = 0
        self._refusals: dict[str, list[RefusalReason]] = {}

    def refuse(self, name: str, *reasons: RefusalReason) -> None:
        """Refuse the next calls of this name, with these reasons in turn."""
        self._refusals[name] = list(reasons)

    def aim(self, *, raise_in: int | None = None, refuse_in: int | None = None) -> None:
        """Choose a call counted from now: 0 is the next one. None chooses nothing."""
        now = len(self.calls)
        self.raise_at = None if raise_in is None else now + raise_in
        self.refuse_at = None if refuse_in is None else now + refuse_in

    def _is_refused(self, name: str) -> bool:
        if self.refuse_at is None or len(self.calls) - 1 < self.refuse_at or name not in REFUSABLE:
            return False
        self.refuse_at = None
        self.num_refused += 1
        return True

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
            if self._refusals.get(name):
                return Refusal(args[0].request_id, self._refusals[name].pop(0), 1, 0)  # type: ignore[attr-defined]
            if self._is_refused(name):
                return Refusal(args[0].request_id, _REASONS[name], 1, 0)  # type: ignore[attr-defined]
            answer = target(*args, **kwargs)
            return LoggedTransaction(answer, self.note) if name.startswith("begin_") else answer

        return counted


class LoggedWindow:
    """A transfer window whose `try_take` is a counted call."""

    def __init__(self, window: TransferAdmission, note: Callable[[str], None]) -> None:
        """Wrap a window."""
        self._window = window
        self._note = note

    def try_take(self, request_id: RequestId, num_bytes: int) -> bool:
        """Take, or fail before anything is taken."""
        self._note("try_take")
        return self._window.try_take(request_id, num_bytes)

    def release(self, request_id: RequestId) -> None:
        """Give back."""
        self._window.release(request_id)

    @property
    def available_bytes(self) -> int:
        """The window's."""
        return self._window.available_bytes


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
