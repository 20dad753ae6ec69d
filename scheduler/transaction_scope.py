"""Ends a manager's transaction exactly once: commit on a clean exit, rollback on any exception (M2)."""

from types import TracebackType

from manager import Transaction


class TransactionScope:
    """A context manager over one open transaction."""

    __slots__ = ("_transaction",)

    def __init__(self, transaction: Transaction) -> None:
        """`transaction` was opened by the caller for this scope."""
        self._transaction = transaction

    def __enter__(self) -> Transaction:
        """The transaction, for savepoints."""
        return self._transaction

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Commit or roll back; never hides the error."""
        if kind is None:
            self._transaction.commit()
        else:
            self._transaction.rollback()
