"""A fault at every inner step of every public call leaves the manager as it was, order included (M1)."""

from collections.abc import Callable, Iterator

import pytest

from manager import KVCacheManagerV2, LeaseId, Tier
from manager.adapters import AdapterPool
from manager.cache_set import CacheSet
from manager.events import EventLog
from manager.eviction import EvictionController, PlannedEvictions
from manager.kv_cache import KVCache
from manager.lease import LeaseTable, QuarantineTable
from manager.page import PageTable
from manager.radix_tree import BlockRadixTree
from manager.request_caches import RequestCaches
from manager.storage.copies import CopyQueue
from manager.storage.slots import SlotAllocator
from manager.storage_manager import StorageManager
from manager.tier_moves import TierMoves
from manager.transaction import CacheTransaction
from tests.conftest import Register
from tests.fakes.cache_builders import compute_context, free, granted, make_geometry
from tests.fakes.cache_request import FakeRequest
from tests.fakes.faults import FaultInjector, InjectedFaultError, injected

STEPS: list[tuple[type, str]] = [
    *((SlotAllocator, name) for name in ("take", "give", "take_exactly")),
    *(
        (PageTable, name)
        for name in ("create", "destroy", "set_state", "commit", "set_place", "add_locks", "remove_locks")
    ),
    *((EvictionController, name) for name in ("push", "add", "pop", "put_back")),
    *((PlannedEvictions, name) for name in ("evict", "send", "note_taken", "give_back")),
    *(
        (CopyQueue, name)
        for name in (
            "add_stage",
            "add_fill",
            "cancel_fill",
            "free_later",
            "keep_after_all",
        )
    ),
    *((BlockRadixTree, name) for name in ("find", "root", "insert_chain", "attach", "detach", "prune")),
    *(
        (StorageManager, name)
        for name in ("take", "claim", "unclaim", "release", "untake", "commit_pages", "hold", "bring_up", "publish")
    ),
    *(
        (KVCache, name)
        for name in (
            "claim_prefix",
            "grow",
            "ungrow",
            "advance",
            "rewind",
            "reserve",
            "release",
            "suspend",
            "resume",
        )
    ),
    *((CopyQueue, name) for name in ("add_clone", "cancel_clone")),
    (KVCache, "claim_shared"),
    *((RequestCaches, name) for name in ("open", "open_fork", "close", "revert", "suspend", "resume")),
    *((CacheSet, name) for name in ("grow", "suspend", "resume", "reserve", "activate", "release", "set_index_slot")),
    *((AdapterPool, name) for name in ("pin", "unpin", "publish")),
    *((TierMoves, name) for name in ("take_slots", "promote", "unpromote", "move_down_held", "add_hold", "trim")),
    *((LeaseTable, name) for name in ("add", "remove")),
    *((QuarantineTable, name) for name in ("add", "remove")),
    *((EventLog, name) for name in ("collect", "apply")),
    *((CacheTransaction, name) for name in ("note_grant", "forget_grant", "note_stop")),
]

OLD, RUNNING, RESERVED = (
    FakeRequest("old", [8] * 9),
    FakeRequest("run", [7] * 8, num_draft_tokens=4),
    FakeRequest("res", [6] * 7),
)
SLEEPING, BELOW, IDLE = FakeRequest("sleep", [3] * 6), FakeRequest("below", [2] * 5), FakeRequest("idle", [1] * 8)
FORK = FakeRequest("fork", [7] * 8, prompt_length=7)
CANCELLED = FakeRequest("cancelled", [5] * 3)
NEW = FakeRequest("new", [8, 8, 8, 8, 5, 5, 5, 5, 5, 5, 5, 5, 5])


@pytest.fixture
def faults() -> Iterator[FaultInjector]:
    with injected(STEPS) as injector:
        yield injector


def busy_manager() -> KVCacheManagerV2:
    """Nine device slots, none free; a suspended cache and an evicted prefix in the host tier."""
    geometry, config = make_geometry(9, host_slots=10, max_sequences=6, event_queue_blocks=50)
    manager = KVCacheManagerV2(geometry, config)
    compute_context(manager, SLEEPING)
    compute_context(manager, BELOW)
    free(manager, BELOW)
    plan = manager.begin_plan()
    granted(manager.suspend_request(SLEEPING))
    plan.commit()
    compute_context(manager, OLD)
    free(manager, OLD)
    compute_context(manager, RUNNING, 7)
    compute_context(manager, IDLE)
    plan = manager.begin_plan()
    granted(manager.prepare_disagg_gen_init(RESERVED))
    plan.commit()
    plan = manager.begin_plan()
    granted(manager.prepare_disagg_gen_init(CANCELLED))
    plan.commit()
    complete = manager.begin_complete()
    manager.quarantine(CANCELLED)
    manager.grant_lease(RUNNING)
    complete.commit()
    assert manager.stats().tiers[Tier.HOST].cached >= 1
    return manager


def in_plan(call: Callable[[KVCacheManagerV2], object]) -> Callable[[KVCacheManagerV2, FaultInjector, int, bool], None]:
    def run(manager: KVCacheManagerV2, faults: FaultInjector, fail_at: int, after: bool) -> None:
        _run(manager, faults, call, (fail_at, after), is_plan=True)

    return run


def in_complete(
    call: Callable[[KVCacheManagerV2], object],
) -> Callable[[KVCacheManagerV2, FaultInjector, int, bool], None]:
    def run(manager: KVCacheManagerV2, faults: FaultInjector, fail_at: int, after: bool) -> None:
        _run(manager, faults, call, (fail_at, after), is_plan=False)

    return run


def _run(
    manager: KVCacheManagerV2,
    faults: FaultInjector,
    call: Callable[[KVCacheManagerV2], object],
    when: tuple[int, bool],
    *,
    is_plan: bool,
) -> None:
    outside = manager.snapshot()
    transaction = manager.begin_plan() if is_plan else manager.begin_complete()
    if call in NEEDS_GRANT:
        NEEDS_GRANT[call](manager)
    before = manager.snapshot()
    faults.arm(when[0], after=when[1])
    try:
        call(manager)
    except InjectedFaultError:
        faults.disarm()
        assert manager.snapshot() == before
        manager.audit()
        transaction.rollback()
        assert manager.snapshot() == outside
        return
    finally:
        faults.disarm()
    transaction.commit()


def admit(manager: KVCacheManagerV2) -> None:
    manager.prepare_context(NEW)


def grow(manager: KVCacheManagerV2) -> None:
    manager.resize_context(RUNNING, 5)


def generate(manager: KVCacheManagerV2) -> None:
    manager.try_allocate_generation(RUNNING)


def reserve(manager: KVCacheManagerV2) -> None:
    manager.prepare_disagg_gen_init(FakeRequest("offer", [8, 8, 8, 8, 1]))


def pause(manager: KVCacheManagerV2) -> None:
    manager.pause_for_recompute(RUNNING)


def suspend(manager: KVCacheManagerV2) -> None:
    granted(manager.suspend_request(IDLE))


def resume(manager: KVCacheManagerV2) -> None:
    granted(manager.try_allocate_generation(SLEEPING))


def promote(manager: KVCacheManagerV2) -> None:
    assert granted(manager.prepare_context(FakeRequest("again", [2] * 5))).reused_tokens == 4


def fork(manager: KVCacheManagerV2) -> None:
    manager.fork(RUNNING, FORK)


def fork_one(manager: KVCacheManagerV2) -> None:
    granted(manager.pause_for_recompute(IDLE))
    granted(manager.fork(RUNNING, FORK))


def revert_fork(manager: KVCacheManagerV2) -> None:
    manager.revert_allocate_context(FORK)


def revert_resume(manager: KVCacheManagerV2) -> None:
    manager.revert_allocate_generation(SLEEPING)


def revert_promote(manager: KVCacheManagerV2) -> None:
    manager.revert_allocate_context(FakeRequest("again"))


def revert(manager: KVCacheManagerV2) -> None:
    manager.revert_allocate_context(NEW)


def advance(manager: KVCacheManagerV2) -> None:
    manager.advance(RUNNING, 1)


def rewind(manager: KVCacheManagerV2) -> None:
    manager.rewind(RUNNING, 2)


def activate(manager: KVCacheManagerV2) -> None:
    manager.activate_disagg_gen(RESERVED)


def lease(manager: KVCacheManagerV2) -> None:
    manager.grant_lease(RUNNING)


def end_lease(manager: KVCacheManagerV2) -> None:
    manager.end_lease(LeaseId(1))


def quarantine(manager: KVCacheManagerV2) -> None:
    manager.quarantine(RESERVED)


def release_quarantine(manager: KVCacheManagerV2) -> None:
    manager.release_quarantine(CANCELLED.request_id)


def finish(manager: KVCacheManagerV2) -> None:
    manager.free_resources(RUNNING)


def make_room(manager: KVCacheManagerV2) -> None:
    granted(manager.pause_for_recompute(IDLE))


def admit_and_grow(manager: KVCacheManagerV2) -> None:
    granted(manager.prepare_context(NEW))
    granted(manager.resize_context(NEW, 4))


NEEDS_GRANT: dict[Callable[[KVCacheManagerV2], object], Callable[[KVCacheManagerV2], object]] = {
    revert: admit_and_grow,
    revert_resume: resume,
    revert_promote: promote,
    fork: make_room,
    revert_fork: fork_one,
}
PLAN_CALLS = [
    *(admit, grow, generate, reserve, pause, revert),
    *(suspend, resume, promote, revert_resume, revert_promote),
    *(fork, revert_fork),
]
COMPLETE_CALLS = [advance, rewind, activate, lease, end_lease, quarantine, release_quarantine, finish]

READS = {
    *("adapter_pages", "audit", "availability", "block_table", "capacity", "draft_lag", "has_cache"),
    *("history_length", "index_slot", "is_suspended", "known_prefixes", "max_request_tokens", "needs_encoder"),
    *("num_committed_tokens", "pages_to_fill", "snapshot", "stats"),
}
"""They change nothing."""
DRAINS = {"take_adapter_loads", "take_kv_events"}
"""They hand a list over, in one step."""
WITHOUT_INNER_STEPS = {"begin_plan", "begin_complete", "close"}
TESTED_ELSEWHERE = {"finish_fills"}
"""In test_copy_faults: its only way to fail is a copy."""


def test_every_public_call_that_changes_anything_has_its_faults_here() -> None:
    public = {name for name in vars(KVCacheManagerV2) if not name.startswith("_")}
    named = {name for call in (*PLAN_CALLS, *COMPLETE_CALLS) for name in call.__code__.co_names}
    faulty = {name for name in public & named if callable(getattr(KVCacheManagerV2, name))}
    assert public == faulty | READS | DRAINS | WITHOUT_INNER_STEPS | TESTED_ELSEWHERE
    assert not faulty & (READS | DRAINS | WITHOUT_INNER_STEPS | TESTED_ELSEWHERE)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(
    "run",
    [*map(in_plan, PLAN_CALLS), *map(in_complete, COMPLETE_CALLS)],
    ids=[call.__name__ for call in (*PLAN_CALLS, *COMPLETE_CALLS)],
)
def test_a_fault_at_any_inner_step_changes_nothing(
    audited: Register,
    faults: FaultInjector,
    run: Callable[[KVCacheManagerV2, FaultInjector, int, bool], None],
    after: bool,
) -> None:
    run(busy_manager(), faults, 0, after)
    num_steps = faults.num_steps
    assert num_steps
    for fail_at in range(1, num_steps + 1):
        run(audited(busy_manager()), faults, fail_at, after)
        assert faults.has_failed


def test_a_fault_while_publishing_undoes_the_whole_plan(audited: Register, faults: FaultInjector) -> None:
    fail_at, num_steps = 0, 0
    while fail_at <= num_steps:
        manager = audited(busy_manager())
        outside = manager.snapshot()
        plan = manager.begin_plan()
        granted(manager.prepare_context(NEW))
        granted(manager.resize_context(NEW, 4))
        granted(manager.suspend_request(IDLE))
        faults.arm(fail_at)
        if fail_at:
            with pytest.raises(InjectedFaultError):
                plan.commit()
            faults.disarm()
            assert manager.snapshot() == outside
        else:
            plan.commit()
            faults.disarm()
            num_steps = faults.num_steps
            assert num_steps
        fail_at += 1
