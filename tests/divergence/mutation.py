"""A pytest plugin that disables the rollback of one resource, to prove that the rows can fail.

    pytest tests/divergence -p tests.divergence.mutation --disable-rollback-of pages

A resource is a set of inverses in the manager's journal that are dropped instead of run, or one undoing
of the scheduler's own. Used by test_mutations.py in a process of its own; never active otherwise.
"""

from collections.abc import Callable, Sequence

import pytest

from manager.cache_chain import CacheStatus
from manager.request_caches import RequestCaches
from manager.storage.journal import Journal
from scheduler import generation_planner
from scheduler.admission import TransferAdmission
from scheduler.budget import BudgetMark, BudgetTracker
from scheduler.iteration_pass import IterationPass, PassDecisions, PassMark
from scheduler.kv_cache_v2_scheduler import KVCacheV2Scheduler
from scheduler.request import Request
from scheduler.request_table import RequestTable

JOURNALED: dict[str, set[tuple[object, ...]]] = {
    "pages": {("SlotAllocator", "_untake")},
    "prefix_claim": {("PageTable", "_drop_locks")},
    "cursor": {("KVCache", "_put_num_blocks")},
    "cache": {("RequestCaches", "_remove")},
    "adapter": {("AdapterPool", "_put_pins")},
    "statistics": {("CacheTransaction", "_add")},
    "eviction_order": {("EvictionController", "_put_cursor")},
    "resume": {("KVCache", "_put_status", CacheStatus.SUSPENDED)},
    "suspension": {("KVCache", "_put_status", CacheStatus.ACTIVE)},
}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--disable-rollback-of`."""
    parser.addoption("--disable-rollback-of", default=None)


def pytest_configure(config: pytest.Config) -> None:
    """Break one thing for the whole process."""
    resource = config.getoption("--disable-rollback-of")
    if resource in JOURNALED:
        _drop_inverses(JOURNALED[resource])
    elif resource is not None:
        SCHEDULER_MUTATIONS[resource]()


def _drop_inverses(names: set[tuple[object, ...]], *, index_slots: bool = False) -> None:
    allocators: list[object] = []
    make_caches = RequestCaches.__init__

    def make_and_note(self: RequestCaches, *args: object, **kwargs: object) -> None:
        make_caches(self, *args, **kwargs)  # type: ignore[arg-type]
        allocators.append(self.index_slots)

    def undo_to(self: Journal, mark: int) -> None:
        entries = self.entries
        while len(entries) > mark:
            undo, arguments = entries.pop()
            owner = getattr(undo, "__self__", None)
            is_index_slot = any(owner is allocator for allocator in allocators)
            inverse = (type(owner).__name__, getattr(undo, "__name__", ""))
            is_named = any(name[:2] == inverse and _agrees(name[2:], arguments) for name in names)
            if is_named and is_index_slot == index_slots:
                continue
            undo(*arguments)

    RequestCaches.__init__ = make_and_note  # type: ignore[method-assign]
    Journal.undo_to = undo_to  # type: ignore[method-assign]


def _agrees(wanted: tuple[object, ...], arguments: tuple[object, ...]) -> bool:
    """Whether the inverse was journaled with these arguments; the very objects, since some have no equality."""
    return all(one is other for one, other in zip(wanted, arguments, strict=False))


def _index_slot() -> None:
    _drop_inverses({("SlotAllocator", "_untake")}, index_slots=True)


def _draft_length() -> None:
    def note_on_the_request(request: Request, num_draft_tokens: int) -> Request:
        request.num_draft_tokens = num_draft_tokens
        return request

    setattr(generation_planner, "WithDrafts", note_on_the_request)  # noqa: B010 -- a class replaced by a function


def _budget() -> None:
    def keep(self: BudgetTracker, mark: BudgetMark) -> None:
        """Nothing comes back."""

    BudgetTracker.restore = keep  # type: ignore[method-assign]


def _victims() -> None:
    real = IterationPass.return_to

    def return_without_victims(self: IterationPass, mark: PassMark) -> None:
        kept = dict(self.decisions.pushed_out)
        real(self, mark)
        self.decisions.pushed_out.update(kept)

    IterationPass.return_to = return_without_victims  # type: ignore[method-assign]


def _waiting_line() -> None:
    def forget(self: RequestTable, requests: Sequence[Request]) -> None:
        """They are in no place any more."""

    RequestTable.return_to_line = forget  # type: ignore[method-assign,assignment]


def _window() -> None:
    real = KVCacheV2Scheduler._undo

    def undo_but_the_window(self: KVCacheV2Scheduler, decisions: PassDecisions) -> None:
        release = TransferAdmission.release
        TransferAdmission.release = lambda self, request_id: None  # type: ignore[method-assign]
        try:
            real(self, decisions)
        finally:
            TransferAdmission.release = release  # type: ignore[method-assign]

    KVCacheV2Scheduler._undo = undo_but_the_window  # type: ignore[method-assign]


SCHEDULER_MUTATIONS: dict[str, Callable[[], None]] = {
    "index_slot": _index_slot,
    "draft_length": _draft_length,
    "budget": _budget,
    "victims": _victims,
    "waiting_line": _waiting_line,
    "transfer_window": _window,
}
