"""`CacheTransaction`: what one plan or one complete changed; ends by commit or rollback exactly once.

The changes themselves are in the journal. Here is what only the transaction needs: its kind, its marks,
what each request had before its first grant (for reverts), and the statistics that publish adds.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar, cast

from manager.adapters import AdapterPool
from manager.errors import CopyFailedError, LogicError
from manager.events import EventLog
from manager.ids import RequestId
from manager.pools.base import CopyEngine, SlotCopy
from manager.storage.journal import Journal
from manager.storage_manager import StorageManager


class TransactionKind(StrEnum):
    """Before a step, or after it."""

    PLAN = "plan"
    COMPLETE = "complete"


@dataclass(slots=True)
class Before:
    """What a request had before its first grant in this plan.

    Attributes:
        num_blocks: blocks with a place; for a cache made in this plan, the claimed ones.
        num_cross_blocks: the same of the encoder input.
        is_new: the cache was made in this plan.
        is_resumed: the cache was suspended.
        queried_tokens: of its prefix claim in this plan.
        hit_tokens: of its prefix claim in this plan.
    """

    num_blocks: int
    num_cross_blocks: int = 0
    is_new: bool = False
    is_resumed: bool = False
    queried_tokens: int = 0
    hit_tokens: int = 0


@dataclass(frozen=True, slots=True)
class CacheSavepoint:
    """A length of the journal, in one transaction."""

    transaction: "CacheTransaction"
    mark: int


@dataclass(slots=True)
class PublishedCounts:
    """Statistics that change at publish only."""

    queried_tokens: int = 0
    hit_tokens: int = 0
    suspensions: int = 0


class CacheTransaction:
    """One plan or complete.

    Attributes:
        kind: which calls it allows.
        counts: what publish will add to the manager's counts.
        before: requests granted something in this plan.
        stopped: requests suspended or paused in this plan.
    """

    __slots__ = ("_is_open", "_journal", "_on_commit", "_on_rollback", "before", "counts", "kind", "stopped")

    def __init__(
        self,
        kind: TransactionKind,
        journal: Journal,
        on_commit: Callable[["CacheTransaction"], None],
        on_rollback: Callable[["CacheTransaction | None"], None],
    ) -> None:
        """Open; `on_commit` publishes, `on_rollback` hears of every undoing (the transaction when it ends by it)."""
        self.kind = kind
        self.counts = PublishedCounts()
        self.before: dict[RequestId, Before] = {}
        self.stopped: set[RequestId] = set()
        self._journal = journal
        self._on_commit = on_commit
        self._on_rollback = on_rollback
        self._is_open = True

    def commit(self) -> None:
        """Publish everything. A failure while publishing undoes the whole transaction and is raised."""
        self._check_open()
        try:
            self._on_commit(self)
        except BaseException:
            self.rollback()
            raise
        self._is_open = False

    def rollback(self) -> None:
        """Undo everything, order included."""
        self._check_open()
        self._journal.undo_to(0)
        self._is_open = False
        self._on_rollback(self)

    def savepoint(self) -> CacheSavepoint:
        """Mark the present state."""
        self._check_open()
        return CacheSavepoint(self, len(self._journal))

    def rollback_to(self, savepoint: object) -> None:
        """Undo everything since `savepoint`.

        Raises:
            LogicError: it is another transaction's, or was itself undone.
        """
        self._check_open()
        if (
            not isinstance(savepoint, CacheSavepoint)
            or savepoint.transaction is not self
            or savepoint.mark > len(self._journal)
        ):
            msg = "not a savepoint of this transaction, or one that was rolled back before"
            raise LogicError(msg)
        self._journal.undo_to(savepoint.mark)
        self._on_rollback(None)

    # -- for the manager -----------------------------------------------------------------------------

    def note_grant(self, request_id: RequestId, before: Before) -> None:
        """Remember the state before the first grant to a request."""
        if request_id not in self.before:
            self.before[request_id] = before
            self._journal.push((self._forget_grant, (request_id,)))
            if before.is_new:
                self._count(before.queried_tokens, before.hit_tokens, 0)

    def forget_grant(self, request_id: RequestId) -> Before | None:
        """The request's grants were reverted: its statistics go, too."""
        before = self.before.pop(request_id, None)
        if before is not None:
            self._journal.push((self.before.__setitem__, (request_id, before)))
            self._count(-before.queried_tokens, -before.hit_tokens, 0)
        return before

    def note_stop(self, request_id: RequestId) -> None:
        """The request was suspended or paused: what it was granted before in this plan cannot be reverted."""
        before = self.before.pop(request_id, None)
        if before is not None:
            self._journal.push((self.before.__setitem__, (request_id, before)))
        if request_id not in self.stopped:
            self.stopped.add(request_id)
            self._journal.push((self.stopped.discard, (request_id,)))
        self._count(0, 0, 1)

    def _count(self, queried: int, hit: int, suspensions: int) -> None:
        if queried or hit or suspensions:
            self._add(queried, hit, suspensions)
            self._journal.push((self._add, (-queried, -hit, -suspensions)))

    def _add(self, queried: int, hit: int, suspensions: int) -> None:
        self.counts.queried_tokens += queried
        self.counts.hit_tokens += hit
        self.counts.suspensions += suspensions

    def _forget_grant(self, request_id: RequestId) -> None:
        del self.before[request_id]

    def _check_open(self) -> None:
        if not self._is_open:
            msg = f"this {self.kind} has ended"
            raise LogicError(msg)


class TransactionDesk:
    """Opens transactions, one at a time, and publishes them.

    Attributes:
        kind: of the open transaction; None when none is open.
        counts: published so far.
        rollbacks: transactions, savepoints and requests undone so far; not undone itself.
    """

    __slots__ = ("_adapters", "_engine", "_events", "_journal", "_open", "_storage", "counts", "kind", "rollbacks")

    def __init__(
        self,
        journal: Journal,
        storage: StorageManager,
        adapters: AdapterPool,
        engine: CopyEngine,
        events: EventLog | None = None,
    ) -> None:
        """Nothing is open; `events` hears of what is published."""
        self._events = events
        self._adapters = adapters
        self._engine = engine
        self._journal = journal
        self._storage = storage
        self._open: CacheTransaction | None = None
        self.kind: TransactionKind | None = None
        self.counts = PublishedCounts()
        self.rollbacks = 0

    def begin(self, kind: TransactionKind) -> CacheTransaction:
        """Open a transaction. Raises LogicError when one is open."""
        if self._open is not None:
            msg = f"a {self._open.kind} is open already"
            raise LogicError(msg)
        if kind is TransactionKind.PLAN:
            self._storage.settle()
        self._open = CacheTransaction(kind, self._journal, self._publish, self._on_rollback)
        self.kind = kind
        return self._open

    def require(self, kind: TransactionKind) -> CacheTransaction:
        """The open transaction. Raises LogicError when it is of another kind, or none is open."""
        transaction = self._open
        if transaction is None or transaction.kind is not kind:
            msg = f"this call belongs to a {kind}; open is {transaction.kind if transaction else 'nothing'}"
            raise LogicError(msg)
        return transaction

    def _publish(self, transaction: CacheTransaction) -> None:
        fills: Sequence[SlotCopy] = ()
        if self._storage.has_lower_tiers:
            self._storage.moves.trim()
            self._stage()
        if self._journal.entries:
            if self._adapters.pins:
                self._adapters.publish()
            fills = self._storage.publish()
            if self._events is not None:
                self._events.apply(self._events.collect())
            self._storage.forget()
            self._journal.forget()
        self.counts.queried_tokens += transaction.counts.queried_tokens
        self.counts.hit_tokens += transaction.counts.hit_tokens
        self.counts.suspensions += transaction.counts.suspensions
        self._open = self.kind = None
        if fills:
            self._engine.fill(fills)

    def _stage(self) -> None:
        staged = self._storage.moves.staged()
        if staged:
            try:
                self._engine.stage(staged)
            except CopyFailedError as error:
                self._storage.moves.break_tier(error.target_store)
                raise

    def _on_rollback(self, ended: CacheTransaction | None) -> None:
        self.rollbacks += 1
        if ended is not None:
            self._open = self.kind = None


class Transactional(Protocol):
    """An object whose calls belong to transactions."""

    journal: Journal
    desk: TransactionDesk


_Owner = TypeVar("_Owner", bound=Transactional)
_Params = ParamSpec("_Params")
_Result = TypeVar("_Result")
_Call = Callable[Concatenate[_Owner, _Params], _Result]


def inside(
    kind: TransactionKind,
) -> Callable[[_Call[_Owner, _Params, _Result]], _Call[_Owner, _Params, _Result]]:
    """Decorate a call: refuse it outside `kind` of transaction, and undo all it did when it raises (M1)."""

    def decorate(method: _Call[_Owner, _Params, _Result]) -> _Call[_Owner, _Params, _Result]:
        @wraps(method)
        def guarded(owner: _Owner, *args: _Params.args, **kwargs: _Params.kwargs) -> _Result:
            if owner.desk.kind is not kind:
                owner.desk.require(kind)
            mark = len(owner.journal.entries)
            try:
                return method(owner, *args, **kwargs)
            except BaseException:
                owner.journal.undo_to(mark)
                raise

        return cast("_Call[_Owner, _Params, _Result]", guarded)

    return decorate
