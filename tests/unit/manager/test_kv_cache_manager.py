"""KVCacheManagerV2 through its public calls: plans, completes, refusals, reuse."""

import numpy as np
import pytest

from manager import (
    KVCacheManager,
    KVCacheManagerV2,
    LayerGroupId,
    LogicError,
    PageCounts,
    PoolGroupId,
    RefusalReason,
    ReuseScope,
    Tier,
)
from tests.conftest import Register
from tests.fakes.cache_builders import compute_context, free, granted, make_geometry, make_manager, refused
from tests.fakes.cache_request import FakeRequest

GROUP = LayerGroupId(0)


def counts(manager: KVCacheManager) -> PageCounts:
    return manager.stats().tiers[Tier.DEVICE]


def test_a_context_takes_whole_blocks_and_commits_the_full_ones(audited: Register) -> None:
    manager = audited(make_manager())
    request = FakeRequest("a", list(range(10)))
    compute_context(manager, request)
    assert manager.history_length(request.request_id) == 10
    assert manager.capacity(request.request_id) == 12
    assert manager.num_committed_tokens(request.request_id) == 8
    assert counts(manager) == PageCounts(total=16, free=13, in_use=3)
    assert manager.block_table(request.request_id, GROUP).tolist() == [0, 1, 2]


def test_a_grant_names_what_availability_loses(audited: Register) -> None:
    manager = audited(make_manager())
    compute_context(manager, FakeRequest("a", list(range(9))))
    free(manager, FakeRequest("a"))
    request = FakeRequest("b", [*range(8), 70, 71, 72])
    plan = manager.begin_plan()
    before = manager.availability()
    claim = granted(manager.prepare_context(request))
    growth = granted(manager.resize_context(request, 3))
    after = manager.availability()
    assert (claim.reused_tokens, claim.num_pages(), claim.index_slots) == (8, 2, 1)
    assert (growth.tokens, growth.num_pages(), growth.capacity) == (4, 1, 12)
    assert before.pages[PoolGroupId(0)] - after.pages[PoolGroupId(0)] == 3
    assert before.index_slots - after.index_slots == 1
    plan.commit()


def test_the_last_token_is_never_claimed(audited: Register) -> None:
    manager = audited(make_manager())
    compute_context(manager, FakeRequest("a", list(range(8))))
    plan = manager.begin_plan()
    assert granted(manager.prepare_context(FakeRequest("b", list(range(8))))).reused_tokens == 7
    plan.commit()


def test_scopes_share_nothing(audited: Register) -> None:
    manager = audited(make_manager())
    compute_context(manager, FakeRequest("a", list(range(9))))
    plan = manager.begin_plan()
    other = FakeRequest("b", list(range(9)), reuse_scope=ReuseScope("lora-1"))
    assert granted(manager.prepare_context(other)).reused_tokens == 0
    plan.commit()


def test_pages_of_a_running_step_are_not_matched(audited: Register) -> None:
    manager = audited(make_manager())
    plan = manager.begin_plan()
    first, second = FakeRequest("a", list(range(9))), FakeRequest("b", list(range(9)))
    granted(manager.prepare_context(first))
    granted(manager.resize_context(first, 9))
    assert granted(manager.prepare_context(second)).reused_tokens == 0
    plan.commit()


def test_of_two_caches_with_the_same_block_one_page_is_kept(audited: Register) -> None:
    manager = audited(make_manager())
    first, second = FakeRequest("a", list(range(9))), FakeRequest("b", list(range(9)))
    plan = manager.begin_plan()
    for request in (first, second):
        granted(manager.prepare_context(request))
        granted(manager.resize_context(request, 9))
    plan.commit()
    complete = manager.begin_complete()
    manager.advance(first, 9)
    manager.advance(second, 9)
    complete.commit()
    tables = [manager.block_table(request.request_id, GROUP) for request in (first, second)]
    assert np.array_equal(tables[0][:2], tables[1][:2])
    assert tables[0][2] != tables[1][2]
    assert counts(manager).in_use == 4


def test_generation_grows_only_when_a_block_is_full(audited: Register) -> None:
    manager = audited(make_manager())
    request = FakeRequest("a", list(range(7)))
    compute_context(manager, request)
    pages = []
    for token in range(3):
        request.token_ids.append(token)
        plan = manager.begin_plan()
        pages.append(granted(manager.try_allocate_generation(request)).num_pages())
        plan.commit()
        complete = manager.begin_complete()
        manager.advance(request, 1)
        complete.commit()
    assert pages == [0, 1, 0]
    assert manager.num_committed_tokens(request.request_id) == 8


def test_draft_tokens_get_a_place(audited: Register) -> None:
    manager = audited(make_manager())
    request = FakeRequest("a", list(range(7)), num_draft_tokens=6)
    compute_context(manager, request)
    plan = manager.begin_plan()
    assert granted(manager.try_allocate_generation(request)).capacity == 16
    plan.commit()


def test_a_refusal_says_what_is_missing_and_changes_nothing(audited: Register) -> None:
    manager = audited(make_manager(4))
    compute_context(manager, FakeRequest("a", list(range(12))))
    request = FakeRequest("b", list(range(50, 60)))
    plan = manager.begin_plan()
    granted(manager.prepare_context(request))
    before = manager.snapshot()
    refusal = refused(manager.resize_context(request, 10))
    assert (refusal.reason, refusal.needed, refusal.available) == (RefusalReason.OUT_OF_PAGES, 3, 1)
    assert manager.snapshot() == before
    plan.rollback()


def test_more_than_the_pool_never_fits(audited: Register) -> None:
    manager = audited(make_manager(4))
    request = FakeRequest("a", list(range(17)))
    plan = manager.begin_plan()
    granted(manager.prepare_context(request))
    assert refused(manager.resize_context(request, 17)).reason is RefusalReason.NEVER_FITS
    plan.rollback()
    assert manager.max_request_tokens == 16


def test_without_an_index_slot_nothing_is_claimed(audited: Register) -> None:
    manager = audited(make_manager(max_sequences=1))
    compute_context(manager, FakeRequest("a", [1, 2]))
    plan = manager.begin_plan()
    before = manager.snapshot()
    for answer in (
        manager.prepare_context(FakeRequest("b", [1, 2])),
        manager.prepare_disagg_gen_init(FakeRequest("c", [1, 2])),
    ):
        assert refused(answer).reason is RefusalReason.OUT_OF_INDEX_SLOTS
    assert manager.snapshot() == before
    plan.rollback()


def test_a_thousand_refused_admissions_leave_no_trace(audited: Register) -> None:
    manager = audited(make_manager(6))
    compute_context(manager, FakeRequest("a", list(range(17))))
    before = manager.snapshot()
    for number in range(1000):
        plan = manager.begin_plan()
        request = FakeRequest(f"r{number}", list(range(14)))
        refused(manager.prepare_disagg_gen_init(FakeRequest("d", list(range(50, 60)))))
        granted(manager.prepare_context(request))
        refused(manager.resize_context(request, 20))
        plan.rollback()
    assert manager.snapshot() == before


def test_suspension_without_a_lower_tier_is_refused(audited: Register) -> None:
    manager = audited(make_manager())
    request = FakeRequest("a", list(range(9)))
    compute_context(manager, request)
    plan = manager.begin_plan()
    before = manager.snapshot()
    assert refused(manager.suspend_request(request)).reason is RefusalReason.LOWER_TIERS_FULL
    assert manager.snapshot() == before
    plan.commit()


def test_a_paused_request_finds_its_committed_blocks_again(audited: Register) -> None:
    manager = audited(make_manager())
    request = FakeRequest("a", list(range(11)))
    compute_context(manager, request)
    plan = manager.begin_plan()
    manager.pause_for_recompute(request)
    assert not manager.has_cache(request.request_id)
    plan.commit()
    assert counts(manager) == PageCounts(total=16, free=14, cached=2)
    plan = manager.begin_plan()
    assert granted(manager.prepare_context(request)).reused_tokens == 8
    plan.commit()


@pytest.mark.parametrize(("advanced", "rewound"), [(1, 2), (5, 2)])
def test_only_uncommitted_history_can_be_rewound(audited: Register, advanced: int, rewound: int) -> None:
    manager = audited(make_manager())
    request = FakeRequest("a", list(range(8)))
    compute_context(manager, request)
    request.token_ids.extend(range(advanced))
    plan = manager.begin_plan()
    granted(manager.try_allocate_generation(request))
    plan.commit()
    complete = manager.begin_complete()
    manager.advance(request, advanced)
    with pytest.raises(LogicError, match="cannot rewind"):
        manager.rewind(request, rewound)
    manager.rewind(request, 1)
    assert manager.history_length(request.request_id) == 7 + advanced
    complete.commit()


def test_history_never_passes_capacity(audited: Register) -> None:
    manager = audited(make_manager())
    request = FakeRequest("a", list(range(20)))
    compute_context(manager, request, 4)
    complete = manager.begin_complete()
    with pytest.raises(LogicError, match="capacity 4"):
        manager.advance(request, 1)
    complete.commit()


def test_without_block_reuse_nothing_is_cached(audited: Register) -> None:
    manager = audited(KVCacheManagerV2(*make_geometry(enable_block_reuse=False)))
    request = FakeRequest("a", list(range(9)))
    compute_context(manager, request)
    free(manager, request)
    assert counts(manager) == PageCounts(total=16, free=16)
