"""Reuse that ends within a block: the block is copied, and its source stays until the copy is on its way."""

from manager import KVCacheManagerV2, PageCounts, Tier
from tests.conftest import Register
from tests.fakes.cache_builders import compute_context, free, granted, make_geometry, make_manager
from tests.fakes.cache_request import FakeRequest


def warm(manager: KVCacheManagerV2, tokens: list[int]) -> None:
    request = FakeRequest("warm", tokens)
    compute_context(manager, request)
    free(manager, request)


def test_a_block_that_begins_alike_is_copied(audited: Register) -> None:
    manager = audited(make_manager())
    warm(manager, list(range(12)))
    request = FakeRequest("a", [0, 1, 2, 3, 4, 5, 77, 78, 79])
    plan = manager.begin_plan()
    before = manager.availability()
    grant = granted(manager.prepare_context(request))
    assert (grant.history_length, grant.reused_tokens, grant.capacity) == (6, 6, 8)
    # One block claimed, one copied, and its source pinned until the plan is committed.
    assert grant.num_pages() == 3
    assert sum(before.pages.values()) - sum(manager.availability().pages.values()) == 3
    plan.commit()
    assert manager.stats().tiers[Tier.DEVICE] == PageCounts(total=16, free=12, cached=2, in_use=2)


def test_the_copy_is_private_until_it_is_full(audited: Register) -> None:
    manager = audited(make_manager())
    warm(manager, list(range(8)))
    request = FakeRequest("a", [0, 1, 2, 3, 4, 5, 77, 78, 79])
    compute_context(manager, request)
    assert manager.num_committed_tokens(request.request_id) == 8
    plan = manager.begin_plan()
    assert granted(manager.prepare_context(FakeRequest("b", [0, 1, 2, 3, 4, 5, 6, 7, 8]))).reused_tokens == 8
    plan.commit()


def test_a_reverted_copy_leaves_nothing(audited: Register) -> None:
    manager = audited(make_manager(6))
    warm(manager, list(range(8)))
    warm(manager, [50] * 16)
    before = manager.snapshot()
    request = FakeRequest("a", [0, 1, 77])
    plan = manager.begin_plan()
    assert granted(manager.prepare_context(request)).reused_tokens == 2
    manager.revert_allocate_context(request)
    plan.commit()
    assert manager.snapshot().without_slot_names() == before.without_slot_names()


def test_a_request_that_fills_the_pool_does_without_the_copy(audited: Register) -> None:
    manager = audited(make_manager(4))
    warm(manager, list(range(8)))
    request = FakeRequest("a", [0, 1, 2, *range(50, 63)])
    plan = manager.begin_plan()
    assert granted(manager.prepare_context(request)).reused_tokens == 0
    granted(manager.resize_context(request, 16))
    plan.commit()


def test_partial_reuse_can_be_switched_off(audited: Register) -> None:
    manager = audited(KVCacheManagerV2(*make_geometry(enable_partial_reuse=False)))
    warm(manager, list(range(8)))
    plan = manager.begin_plan()
    assert granted(manager.prepare_context(FakeRequest("a", [0, 1, 2, 3, 4, 77]))).reused_tokens == 4
    plan.commit()


def test_a_reservation_claims_whole_blocks_only(audited: Register) -> None:
    manager = audited(make_manager())
    warm(manager, list(range(12)))
    plan = manager.begin_plan()
    assert granted(manager.prepare_disagg_gen_init(FakeRequest("a", [0, 1, 2, 3, 4, 5, 77]))).reused_tokens == 4
    plan.commit()
