"""Sliding windows and sinks: pages go when nothing can see them any more, and prefixes need only what is seen."""

import pytest

from manager import KVCacheManagerV2, LayerGroupId, LogicError, PageCounts, Tier
from tests.conftest import Register
from tests.fakes.cache_builders import compute_context, free, granted, make_geometry
from tests.fakes.cache_request import FakeRequest

WINDOWED = LayerGroupId(0)


def windowed_manager(windows: tuple[int | None, ...], num_slots: int = 32, sinks: int = 0) -> KVCacheManagerV2:
    geometry, config = make_geometry(num_slots, windows=windows, num_sink_tokens=sinks)
    return KVCacheManagerV2(geometry, config)


def test_pages_leave_with_the_window_and_stay_cached(audited: Register) -> None:
    manager = audited(windowed_manager((8,)))
    request = FakeRequest("a", list(range(21)))
    compute_context(manager, request, 12)
    assert manager.block_table(request.request_id, WINDOWED).tolist() == [-1, 1, 2]
    compute_context(manager, request, 9)
    assert manager.block_table(request.request_id, WINDOWED).tolist()[:3] == [-1, -1, -1]
    assert manager.stats().tiers[Tier.DEVICE] == PageCounts(total=32, free=26, cached=3, in_use=3)


def test_sinks_stay(audited: Register) -> None:
    manager = audited(windowed_manager((8,), sinks=2))
    request = FakeRequest("a", list(range(21)))
    compute_context(manager, request)
    assert (manager.block_table(request.request_id, WINDOWED) >= 0).tolist() == [True, False, False, True, True, True]


def test_full_layers_beside_keep_every_page(audited: Register) -> None:
    manager = audited(windowed_manager((8, None)))
    request = FakeRequest("a", list(range(21)))
    compute_context(manager, request)
    assert (manager.block_table(request.request_id, LayerGroupId(1)) >= 0).all()
    assert not (manager.block_table(request.request_id, WINDOWED) >= 0).all()


def test_a_prefix_needs_only_what_its_window_shows(audited: Register) -> None:
    manager = audited(windowed_manager((8,), num_slots=6))
    first = FakeRequest("a", list(range(20)))
    compute_context(manager, first, 12)
    compute_context(manager, first, 8)
    free(manager, first)
    other = FakeRequest("b", [9] * 12)  # takes the slots of the oldest blocks, which left the window
    compute_context(manager, other)
    free(manager, other)
    plan = manager.begin_plan()
    assert granted(manager.prepare_context(FakeRequest("c", list(range(21))))).reused_tokens == 20
    plan.rollback()


def test_a_prefix_ends_where_a_window_has_lost_its_pages(audited: Register) -> None:
    manager = audited(windowed_manager((8,), num_slots=8))
    first = FakeRequest("a", list(range(20)))
    compute_context(manager, first, 12)
    compute_context(manager, first, 8)
    free(manager, first)
    plan = manager.begin_plan()
    # Sixteen positions of another continuation: blocks 2 and 3 are needed, 3 is what the first cache had last.
    grant = granted(manager.prepare_context(FakeRequest("b", [*range(16), 99, 98])))
    assert grant.reused_tokens == 16
    plan.rollback()


def test_a_reservation_takes_windowed_pages_for_the_prompts_end_only(audited: Register) -> None:
    manager = audited(windowed_manager((8, None)))
    request = FakeRequest("a", list(range(23)))
    plan = manager.begin_plan()
    grant = granted(manager.prepare_disagg_gen_init(request))
    plan.commit()
    assert grant.num_pages() == 6 + 2
    assert {page.block for page in manager.pages_to_fill(request.request_id) if page.layer_group == WINDOWED} == {4, 5}
    complete = manager.begin_complete()
    manager.activate_disagg_gen(request)
    with pytest.raises(LogicError, match="left the window"):
        manager.rewind(request, 2)
    complete.commit()


def test_a_received_block_that_has_left_every_window_is_committed_with_the_next_that_has_not(
    audited: Register,
) -> None:
    # A window of one block, and a prompt one short of three: blocks 0 and 1 are full and have no page.
    manager = audited(windowed_manager((4,)))
    request = FakeRequest("a", list(range(20)), prompt_length=11)
    plan = manager.begin_plan()
    granted(manager.prepare_disagg_gen_init(request))
    plan.commit()
    complete = manager.begin_complete()
    manager.activate_disagg_gen(request)
    complete.commit()
    manager.audit()
    compute_context(manager, FakeRequest("b", [50 + n for n in range(20)]))  # would take the place of a lost node
    complete = manager.begin_complete()
    manager.advance(request, 1)
    complete.commit()
    assert manager.num_committed_tokens(request.request_id) == 12
    manager.audit()


def test_pools_of_different_page_sizes_are_charged_apart(audited: Register) -> None:
    manager = audited(windowed_manager((None, None, 8), num_slots=64))
    request = FakeRequest("a", list(range(10)))
    plan = manager.begin_plan()
    granted(manager.prepare_context(request))
    assert sorted(cost.pages for cost in granted(manager.resize_context(request, 10)).pages) == [3, 3]
    plan.commit()
