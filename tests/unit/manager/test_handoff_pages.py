"""Leases, reservations and quarantine: pages that outlive or precede their request (M7, the manager's half)."""

import pytest

from manager import KVCacheManager, LeaseId, LogicError, PageCounts, RefusalReason, Tier
from tests.conftest import Register
from tests.fakes.cache_builders import compute_context, free, granted, make_manager, refused
from tests.fakes.cache_request import FakeRequest


def counts(manager: KVCacheManager) -> PageCounts:
    return manager.stats().tiers[Tier.DEVICE]


def test_leased_pages_outlive_their_request_and_are_not_evicted(audited: Register) -> None:
    manager = audited(make_manager(4))
    request = FakeRequest("a", list(range(10)))
    compute_context(manager, request)
    complete = manager.begin_complete()
    lease = manager.grant_lease(request)
    manager.free_resources(request)
    complete.commit()
    assert (lease.epoch, lease.num_tokens, [page.slot for page in lease.pages]) == (7, 10, [0, 1, 2])
    assert counts(manager) == PageCounts(total=4, free=1, in_use=3, leased=3)
    plan = manager.begin_plan()
    other = FakeRequest("b", [9] * 5)
    granted(manager.prepare_context(other))
    assert refused(manager.resize_context(other, 5)).reason is RefusalReason.OUT_OF_PAGES
    plan.rollback()
    complete = manager.begin_complete()
    manager.end_lease(lease.lease_id)
    complete.commit()
    assert counts(manager) == PageCounts(total=4, free=2, cached=2)


def test_a_part_of_what_is_computed_can_be_leased_while_the_rest_goes_on(audited: Register) -> None:
    manager = audited(make_manager(6))
    request = FakeRequest("a", list(range(10)))
    compute_context(manager, request)
    complete = manager.begin_complete()
    part = manager.grant_lease(request, 8)
    for wrong in (-4, 7, 12):
        with pytest.raises(LogicError, match="cannot lease"):
            manager.grant_lease(request, wrong)
    complete.commit()
    assert (part.num_tokens, [page.slot for page in part.pages]) == (8, [0, 1])
    assert counts(manager).leased == 2
    complete = manager.begin_complete()
    whole = manager.grant_lease(request)
    manager.free_resources(request)
    complete.commit()
    assert [page.slot for page in whole.pages] == [0, 1, 2]
    for lease_id in (whole.lease_id, part.lease_id):
        complete = manager.begin_complete()
        manager.end_lease(lease_id)
        complete.commit()
    assert counts(manager) == PageCounts(total=6, free=4, cached=2)


def test_a_lease_ends_once(audited: Register) -> None:
    manager = audited(make_manager())
    complete = manager.begin_complete()
    with pytest.raises(LogicError, match="no lease 3"):
        manager.end_lease(LeaseId(3))
    complete.commit()


def test_a_lease_given_in_a_complete_that_was_rolled_back_holds_nothing_and_its_id_is_not_used_again(
    audited: Register,
) -> None:
    manager = audited(make_manager())
    request = FakeRequest("a", list(range(5)))
    compute_context(manager, request)
    before = manager.snapshot()
    complete = manager.begin_complete()
    lost = manager.grant_lease(request)
    complete.rollback()
    assert manager.snapshot() == before
    complete = manager.begin_complete()
    assert manager.grant_lease(request).lease_id != lost.lease_id
    complete.commit()


def test_a_leased_block_can_still_be_claimed(audited: Register) -> None:
    manager = audited(make_manager())
    request = FakeRequest("a", list(range(9)))
    compute_context(manager, request)
    complete = manager.begin_complete()
    lease = manager.grant_lease(request)
    manager.free_resources(request)
    complete.commit()
    compute_context(manager, FakeRequest("b", list(range(9))))
    complete = manager.begin_complete()
    manager.end_lease(lease.lease_id)
    complete.commit()
    assert counts(manager) == PageCounts(total=16, free=13, in_use=3)


def test_a_reservation_takes_all_that_activation_needs(audited: Register) -> None:
    manager = audited(make_manager())
    compute_context(manager, FakeRequest("warm", list(range(9))))
    free(manager, FakeRequest("warm"))
    request = FakeRequest("a", [*range(8), 1, 2, 3, 4, 5, 6, 7], num_draft_tokens=2)
    plan = manager.begin_plan()
    grant = granted(manager.prepare_disagg_gen_init(request))
    plan.commit()
    assert (grant.reused_tokens, grant.num_pages(), grant.index_slots, grant.capacity) == (8, 5, 1, 20)
    assert [page.block for page in manager.pages_to_fill(request.request_id)] == [2, 3]
    assert counts(manager) == PageCounts(total=16, free=11, in_use=5, reserved=3)
    complete = manager.begin_complete()
    manager.activate_disagg_gen(request)
    complete.commit()
    assert manager.history_length(request.request_id) == 15
    assert manager.num_committed_tokens(request.request_id) == 12
    assert counts(manager).reserved == 0
    request.token_ids.append(9)
    plan = manager.begin_plan()
    assert granted(manager.try_allocate_generation(request)).num_pages() == 0
    plan.commit()


def test_a_prompt_that_is_cached_whole_needs_nothing_filled(audited: Register) -> None:
    manager = audited(make_manager())
    compute_context(manager, FakeRequest("warm", list(range(8))))
    request = FakeRequest("a", list(range(8)))
    plan = manager.begin_plan()
    assert granted(manager.prepare_disagg_gen_init(request)).reused_tokens == 8
    plan.commit()
    assert not manager.pages_to_fill(request.request_id)


def test_a_reservation_that_does_not_fit_leaves_nothing(audited: Register) -> None:
    manager = audited(make_manager(8))
    compute_context(manager, FakeRequest("warm", list(range(20))))
    plan = manager.begin_plan()
    before = manager.snapshot()
    request = FakeRequest("a", [*range(8), *range(50, 62)])
    assert refused(manager.prepare_disagg_gen_init(request)).reason is RefusalReason.OUT_OF_PAGES
    assert refused(manager.prepare_disagg_gen_init(FakeRequest("b", [5] * 40))).reason is RefusalReason.NEVER_FITS
    assert manager.snapshot() == before
    plan.commit()


def test_filling_pages_are_neither_matched_nor_advanced(audited: Register) -> None:
    manager = audited(make_manager())
    request = FakeRequest("a", list(range(9)))
    plan = manager.begin_plan()
    granted(manager.prepare_disagg_gen_init(request))
    assert granted(manager.prepare_context(FakeRequest("b", list(range(9))))).reused_tokens == 0
    with pytest.raises(LogicError, match="reservation"):
        manager.pause_for_recompute(request)
    plan.commit()
    complete = manager.begin_complete()
    with pytest.raises(LogicError, match="reservation"):
        manager.advance(request, 1)
    complete.commit()


def test_quarantined_slots_are_free_only_after_their_release(audited: Register) -> None:
    manager = audited(make_manager())
    compute_context(manager, FakeRequest("warm", list(range(4))))
    free(manager, FakeRequest("warm"))
    request = FakeRequest("a", list(range(16)))
    plan = manager.begin_plan()
    granted(manager.prepare_disagg_gen_init(request))
    plan.commit()
    complete = manager.begin_complete()
    manager.quarantine(request)
    complete.commit()
    assert not manager.has_cache(request.request_id)
    assert counts(manager) == PageCounts(total=16, free=12, cached=1, quarantined=3)
    complete = manager.begin_complete()
    manager.release_quarantine(request.request_id)
    with pytest.raises(LogicError, match="no quarantined pages"):
        manager.release_quarantine(request.request_id)
    complete.commit()
    assert counts(manager) == PageCounts(total=16, free=15, cached=1)


def test_a_reservation_that_was_never_read_into_is_simply_freed(audited: Register) -> None:
    manager = audited(make_manager())
    request = FakeRequest("a", list(range(16)))
    plan = manager.begin_plan()
    granted(manager.prepare_disagg_gen_init(request))
    plan.commit()
    free(manager, request)
    assert counts(manager) == PageCounts(total=16, free=16)
