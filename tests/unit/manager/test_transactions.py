"""Transactions: kinds, ends, savepoints, rollback, and reverts of single requests (M1, M2)."""

import pytest

from manager import Grant, KVCacheManagerV2, LogicError, ManagerStats, RefusalReason
from tests.conftest import Register
from tests.fakes.cache_builders import compute_context, free, granted, make_manager, refused
from tests.fakes.cache_request import FakeRequest


def cached_manager(num_slots: int = 8) -> KVCacheManagerV2:
    """Every slot is cached, in the order of the prompts 100.., 200.., two blocks each."""
    manager = make_manager(num_slots)
    for number in range(num_slots // 2):
        request = FakeRequest(f"old{number}", list(range(100 * number, 100 * number + 8)))
        compute_context(manager, request)
        free(manager, request)
    return manager


def prepare(manager: KVCacheManagerV2, request: FakeRequest) -> None:
    granted(manager.prepare_context(request))
    granted(manager.resize_context(request, len(request.token_ids) - manager.history_length(request.request_id)))


def test_a_call_outside_its_transaction_is_an_error(audited: Register) -> None:
    manager = audited(make_manager())
    request = FakeRequest("a", [1])
    with pytest.raises(LogicError, match="belongs to a plan; open is nothing"):
        manager.prepare_context(request)
    plan = manager.begin_plan()
    with pytest.raises(LogicError, match="belongs to a complete; open is plan"):
        manager.advance(request, 1)
    with pytest.raises(LogicError, match="open already"):
        manager.begin_complete()
    plan.commit()


def test_a_transaction_ends_once(audited: Register) -> None:
    manager = audited(make_manager())
    plan = manager.begin_plan()
    mark = plan.savepoint()
    plan.commit()
    for end in (plan.commit, plan.rollback, plan.savepoint, lambda: plan.rollback_to(mark)):
        with pytest.raises(LogicError, match="has ended"):
            end()


def test_a_rolled_back_plan_of_fifty_requests_leaves_everything_in_its_order(audited: Register) -> None:
    manager = audited(make_manager(128, max_sequences=64))
    for number in range(20):
        compute_context(manager, FakeRequest(f"old{number}", [number // 4, *range(19)]))
        if number % 3:
            free(manager, FakeRequest(f"old{number}"))
    before = manager.snapshot()
    plan = manager.begin_plan()
    for number in range(50):
        request = FakeRequest(f"new{number}", [number // 8, *range(4 + number % 13)])
        if isinstance(manager.prepare_context(request), Grant):
            manager.resize_context(request, len(request.token_ids))
    manager.pause_for_recompute(FakeRequest("old0"))
    assert manager.snapshot() != before
    plan.rollback()
    assert manager.snapshot() == before


def test_an_abandoned_step_leaves_history_where_it_was_and_can_be_completed_by_its_retry(audited: Register) -> None:
    manager = audited(make_manager(8))
    decode, context = FakeRequest("decode", [1] * 7), FakeRequest("context", [2] * 9)
    compute_context(manager, decode)
    decode.token_ids += [5, 6]
    plan = manager.begin_plan()
    granted(manager.try_allocate_generation(decode))
    granted(manager.prepare_context(context))
    granted(manager.resize_context(context, 9))
    plan.commit()
    before = manager.snapshot()
    for is_retry in (False, True):
        complete = manager.begin_complete()
        manager.advance(decode, 1)
        manager.advance(context, 9)
        assert manager.history_length(context.request_id) == 9
        if is_retry:
            complete.commit()
        else:
            complete.rollback()
            assert manager.snapshot() == before
    assert (manager.history_length(decode.request_id), manager.history_length(context.request_id)) == (8, 9)


def test_a_savepoint_undoes_only_what_came_after_it(audited: Register) -> None:
    manager = audited(cached_manager())
    plan = manager.begin_plan()
    prepare(manager, FakeRequest("a", [1, 2, 3, 4, 5]))
    outer, at_outer = plan.savepoint(), manager.snapshot()
    prepare(manager, FakeRequest("b", [6, 7, 8, 9, 10]))
    inner, at_inner = plan.savepoint(), manager.snapshot()
    manager.pause_for_recompute(FakeRequest("a"))
    plan.rollback_to(inner)
    assert manager.snapshot() == at_inner
    plan.rollback_to(outer)
    assert manager.snapshot() == at_outer
    with pytest.raises(LogicError, match="not a savepoint"):
        plan.rollback_to(inner)
    plan.commit()
    assert manager.has_cache(FakeRequest("a").request_id)


def test_a_reverted_request_leaves_what_its_absence_would_have_left(audited: Register) -> None:
    """The requests after it keep what they have; the blocks evicted last come back, not those evicted for it."""
    runs = []
    for with_reverted in (False, True):
        manager = audited(cached_manager())
        plan = manager.begin_plan()
        reverted = FakeRequest("reverted", [901, 902, 903, 904, 905])
        if with_reverted:
            prepare(manager, reverted)
        prepare(manager, FakeRequest("kept", [801, 802, 803]))
        if with_reverted:
            manager.revert_allocate_context(reverted)
        manager.audit()
        prepare(manager, FakeRequest("after", list(range(300, 311))))
        plan.commit()
        runs.append(manager.snapshot().without_slot_names())
    assert runs[0] == runs[1]


def test_a_revert_returns_a_claim_to_its_place_in_the_order(audited: Register) -> None:
    manager = audited(cached_manager())
    before = manager.snapshot().without_slot_names()
    plan = manager.begin_plan()
    claiming = FakeRequest("a", [*range(100, 108), 1])
    granted(manager.prepare_context(claiming))
    evicting = FakeRequest("b", [1, 2, 3, 4, 5, 6, 7, 8, 9])
    prepare(manager, evicting)
    manager.revert_allocate_context(claiming)
    manager.revert_allocate_context(evicting)
    plan.commit()
    snapshot = manager.snapshot()
    assert snapshot.without_slot_names() == before


def test_a_revert_of_growth_keeps_what_the_request_had_before(audited: Register) -> None:
    manager = audited(make_manager())
    request = FakeRequest("a", list(range(4)))
    compute_context(manager, request)
    request.token_ids.append(5)
    before = manager.snapshot()
    plan = manager.begin_plan()
    assert granted(manager.try_allocate_generation(request)).capacity == 8
    manager.revert_allocate_generation(request)
    plan.commit()
    assert manager.snapshot() == before


def test_a_revert_is_undone_by_a_rollback(audited: Register) -> None:
    manager = audited(cached_manager())
    plan = manager.begin_plan()
    request = FakeRequest("a", [*range(100, 108), 1, 2, 3, 4, 5])
    prepare(manager, request)
    prepare(manager, FakeRequest("b", [9]))
    mark, before = plan.savepoint(), manager.snapshot()
    manager.revert_allocate_context(request)
    plan.rollback_to(mark)
    assert manager.snapshot() == before
    plan.rollback()


def test_a_request_paused_in_this_plan_cannot_be_reverted(audited: Register) -> None:
    manager = audited(make_manager())
    request = FakeRequest("a", list(range(9)))
    plan = manager.begin_plan()
    prepare(manager, request)
    manager.pause_for_recompute(request)
    with pytest.raises(LogicError, match="paused in this plan"):
        manager.revert_allocate_context(request)
    plan.commit()


def test_reverting_a_request_that_got_nothing_does_nothing(audited: Register) -> None:
    manager = audited(make_manager())
    before = manager.snapshot()
    plan = manager.begin_plan()
    manager.revert_allocate_context(FakeRequest("a"))
    plan.commit()
    assert manager.snapshot() == before


def test_a_block_planned_to_be_dropped_is_not_matched_in_the_same_plan(audited: Register) -> None:
    manager = audited(cached_manager())
    plan = manager.begin_plan()
    prepare(manager, FakeRequest("a", [901, 902, 903]))
    oldest = FakeRequest("b", [*range(8), 1])
    assert granted(manager.prepare_context(oldest)).reused_tokens == 4
    plan.commit()


def test_slots_evicted_for_one_request_can_be_freed_and_taken_by_another_in_the_same_plan(audited: Register) -> None:
    manager = audited(cached_manager(4))
    plan = manager.begin_plan()
    first, second = FakeRequest("a", [1] * 9), FakeRequest("b", [2] * 7)
    prepare(manager, first)
    manager.pause_for_recompute(first)
    prepare(manager, second)
    manager.revert_allocate_context(second)
    manager.audit()
    prepare(manager, FakeRequest("c", [3] * 16))
    assert refused(manager.prepare_disagg_gen_init(FakeRequest("d", [4]))).reason is RefusalReason.OUT_OF_PAGES
    plan.commit()


def test_statistics_change_at_publish_only(audited: Register) -> None:
    manager = audited(cached_manager())

    def stats() -> tuple[int, int, int]:
        now: ManagerStats = manager.stats()
        return now.prefix_queried_tokens, now.prefix_hit_tokens, now.suspensions

    before = stats()
    plan = manager.begin_plan()
    request = FakeRequest("a", [*range(8), 1])
    prepare(manager, request)
    assert stats() == before
    plan.rollback()
    assert stats() == before
    assert manager.stats().rollbacks == 1
    plan = manager.begin_plan()
    prepare(manager, request)
    manager.pause_for_recompute(request)
    plan.commit()
    assert stats() == (before[0] + 9, before[1] + 8, before[2] + 1)
