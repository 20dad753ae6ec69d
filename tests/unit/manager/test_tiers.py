"""Host and disk tiers: suspension, resume, demotion and promotion (M3); copies that fail are in test_copy_faults."""

import pytest

from manager import LogicError, PageCounts, RefusalReason, Tier, TierLevel
from tests.conftest import Register
from tests.fakes.cache_builders import free, granted, refused
from tests.fakes.cache_request import FakeRequest
from tests.fakes.tiered import Tiered


@pytest.fixture
def tiered(audited: Register) -> Tiered:
    made = Tiered()
    audited(made.manager)
    return made


def test_a_suspended_cache_comes_back_with_its_bytes(tiered: Tiered) -> None:
    manager, request = tiered.manager, FakeRequest("a", list(range(10)))
    tiered.compute(request)
    plan = manager.begin_plan()
    grant = granted(manager.suspend_request(request))
    assert (grant.num_pages(TierLevel.HOST), grant.num_pages()) == (3, 0)
    plan.commit()
    assert manager.is_suspended(request.request_id)
    assert tiered.counts(Tier.DEVICE) == PageCounts(total=6, free=6)
    assert tiered.counts(Tier.HOST).in_use == 3
    with pytest.raises(LogicError, match="no index slot"):
        manager.index_slot(request.request_id)
    tiered.compute(FakeRequest("b", [5] * 20))
    free(manager, FakeRequest("b"))
    tiered.resume(request)
    assert tiered.counts(Tier.HOST).in_use == 0


def test_through_host_and_disk_and_back(audited: Register) -> None:
    tiered = Tiered(device=6, host=2, disk=6)
    audited(tiered.manager)
    request = FakeRequest("a", list(range(17)))
    tiered.compute(request)
    tiered.suspend(request)
    assert tiered.counts(Tier.HOST).in_use == 2
    assert tiered.counts(Tier.DISK).in_use == 3
    tiered.resume(request)


def test_a_decode_resumes_and_grows_as_one(tiered: Tiered) -> None:
    manager, request = tiered.manager, FakeRequest("a", list(range(8)))
    tiered.compute(request)
    tiered.suspend(request)
    request.token_ids.append(8)
    plan = manager.begin_plan()
    before = manager.availability()
    grant = granted(manager.try_allocate_generation(request))
    assert (grant.num_pages(), grant.index_slots, grant.capacity, grant.reused_tokens) == (3, 1, 12, 8)
    assert before.pages[manager.geometry.pool_groups[0].pool_group_id] == 6
    manager.revert_allocate_generation(request)
    assert manager.is_suspended(request.request_id)
    manager.audit()
    granted(manager.try_allocate_generation(request))
    plan.commit()


def test_a_page_that_an_active_cache_needs_stays_on_the_device(tiered: Tiered) -> None:
    first, second = FakeRequest("a", list(range(9))), FakeRequest("b", list(range(9)))
    tiered.compute(first)
    tiered.compute(second)
    tiered.suspend(first)
    assert tiered.counts(Tier.DEVICE).in_use == 3
    assert tiered.counts(Tier.HOST).in_use == 1
    free(tiered.manager, second)
    assert tiered.counts(Tier.DEVICE).in_use == 0
    assert tiered.counts(Tier.HOST).in_use == 3
    tiered.resume(first)


def test_evicted_blocks_are_found_again_in_the_host_tier(tiered: Tiered) -> None:
    manager = tiered.manager
    tiered.compute(FakeRequest("a", list(range(9))))
    free(manager, FakeRequest("a"))
    tiered.compute(FakeRequest("b", [7] * 24))
    assert tiered.counts(Tier.HOST).cached == 2
    free(manager, FakeRequest("b"))
    again = FakeRequest("c", [*range(8), 3])
    plan = manager.begin_plan()
    grant = granted(manager.prepare_context(again))
    assert (grant.reused_tokens, grant.num_pages()) == (8, 2)
    plan.commit()
    assert manager.finish_fills() == ()
    tiered.contents.check(manager, again.request_id, again.token_ids)


def test_what_the_lower_tiers_cannot_take_is_refused_whole(audited: Register) -> None:
    tiered = Tiered(device=6, host=3)
    manager = audited(tiered.manager)
    first, second = FakeRequest("a", list(range(12))), FakeRequest("b", [7] * 5)
    tiered.compute(first)
    tiered.compute(second)
    plan = manager.begin_plan()
    granted(manager.suspend_request(first))
    before = manager.snapshot()
    refusal = refused(manager.suspend_request(second))
    assert (refusal.reason, refusal.needed, refusal.available) == (RefusalReason.LOWER_TIERS_FULL, 2, 0)
    assert manager.snapshot() == before
    plan.commit()


def test_both_tiers_full_while_one_resumes_and_another_is_suspended(audited: Register) -> None:
    """The slots that a resume frees below are free in the next transaction only, so that moves form no cycle."""
    tiered = Tiered(device=4, host=4)
    manager = audited(tiered.manager)
    first, second = FakeRequest("a", list(range(16))), FakeRequest("b", [7] * 16)
    tiered.compute(first)
    tiered.suspend(first)
    tiered.compute(second)
    plan = manager.begin_plan()
    assert refused(manager.prepare_context(first)).reason is RefusalReason.OUT_OF_PAGES
    assert refused(manager.suspend_request(second)).reason is RefusalReason.LOWER_TIERS_FULL
    manager.pause_for_recompute(second)
    granted(manager.prepare_context(first))
    plan.commit()
    assert manager.finish_fills() == ()
    tiered.contents.check(manager, first.request_id, first.token_ids)


def test_a_host_tier_full_of_cached_pages_still_takes_a_suspension(audited: Register) -> None:
    tiered = Tiered(device=8, host=8)
    manager = audited(tiered.manager)
    for number in range(6):
        request = FakeRequest(f"old{number}", [number] * 12)
        tiered.compute(request)
        free(manager, request)
    assert tiered.counts(Tier.HOST).free >= 1
    running = FakeRequest("a", [9, 9, 9])
    tiered.compute(running)
    tiered.suspend(running)
    tiered.resume(running)


def test_resume_waits_below_the_watermark_unless_nothing_runs(audited: Register) -> None:
    tiered = Tiered(device=6, host=6, resume_watermark=0.5)
    manager = audited(tiered.manager)
    first, second = FakeRequest("a", list(range(8))), FakeRequest("b", [7] * 8)
    tiered.compute(first)
    tiered.suspend(first)
    tiered.compute(second)
    plan = manager.begin_plan()
    assert refused(manager.prepare_context(first)).reason is RefusalReason.OVER_RESUME_WATERMARK
    plan.commit()
    free(manager, second)
    tiered.resume(first)


@pytest.mark.parametrize("host", [2, 3, 4])
def test_a_page_that_moves_two_tiers_down_in_one_plan_keeps_its_bytes(audited: Register, host: int) -> None:
    """Suspended and then let go, its pages are cached in a host tier without a free slot: one goes on to the disk."""
    tiered = Tiered(device=6, host=host, disk=6)
    manager, request = audited(tiered.manager), FakeRequest("a", list(range(18)))
    tiered.compute(request)
    plan = manager.begin_plan()
    granted(manager.suspend_request(request))
    manager.pause_for_recompute(request)
    plan.commit()
    again = FakeRequest("again", list(range(18)))
    plan = manager.begin_plan()
    assert granted(manager.prepare_context(again)).reused_tokens == 16
    plan.commit()
    assert manager.finish_fills() == ()
    tiered.contents.check(manager, again.request_id, again.token_ids)


def test_a_reservation_cannot_be_suspended(tiered: Tiered) -> None:
    manager, request = tiered.manager, FakeRequest("a", list(range(5)))
    plan = manager.begin_plan()
    granted(manager.prepare_disagg_gen_init(request))
    with pytest.raises(LogicError, match="being filled"):
        manager.suspend_request(request)
    plan.commit()


def test_what_came_up_for_a_user_that_ended_stays_when_another_claim_of_it_is_undone(tiered: Tiered) -> None:
    manager = tiered.manager
    tiered.compute(FakeRequest("a", list(range(9))))
    free(manager, FakeRequest("a"))
    tiered.compute(FakeRequest("b", [7] * 24))
    free(manager, FakeRequest("b"))
    ended, undone = FakeRequest("c", [*range(8), 3]), FakeRequest("d", [*range(8), 4])
    plan = manager.begin_plan()
    assert granted(manager.prepare_context(ended)).reused_tokens == 8
    assert granted(manager.prepare_context(undone)).reused_tokens == 8
    manager.pause_for_recompute(ended)
    manager.revert_allocate_context(undone)
    manager.audit()
    plan.commit()
    assert manager.finish_fills() == ()
    manager.audit()
    tiered.compute(ended)
    tiered.contents.check(manager, ended.request_id, ended.token_ids)


def test_a_claim_that_is_undone_goes_down_again_although_another_request_copies_from_the_block(tiered: Tiered) -> None:
    manager = tiered.manager
    tiered.compute(FakeRequest("a", list(range(9))))
    free(manager, FakeRequest("a"))
    tiered.compute(FakeRequest("b", [7] * 24))
    free(manager, FakeRequest("b"))
    copying, undone = FakeRequest("c", [0, 1, 9]), FakeRequest("d", [*range(8), 4])
    plan = manager.begin_plan()
    assert granted(manager.prepare_context(copying)).reused_tokens == 2
    before = manager.availability()
    assert granted(manager.prepare_context(undone)).reused_tokens == 8
    manager.revert_allocate_context(undone)
    manager.audit()
    assert manager.availability() == before
    plan.commit()
    assert manager.finish_fills() == ()
    manager.audit()
    tiered.contents.check(manager, copying.request_id, copying.token_ids[:2])
