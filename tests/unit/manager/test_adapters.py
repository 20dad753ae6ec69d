"""Adapters are pinned with their caches, evicted when nobody runs with them, and undone exactly."""

import pytest

from manager import AdapterId, CacheConfigError, LogicError, RefusalReason
from manager.adapters import AdapterSizes
from tests.fakes.cache_builders import compute_context, free, granted, refused
from tests.fakes.cache_request import FakeRequest
from tests.fakes.cache_sets import make_set_manager

A, B, C = AdapterId("a"), AdapterId("b"), AdapterId("c")


def using(name: str, adapter: AdapterId, first: int) -> FakeRequest:
    return FakeRequest(name, list(range(first, first + 4)), adapter_id=adapter)


def test_two_requests_with_one_adapter_pay_for_it_once() -> None:
    manager = make_set_manager()
    compute_context(manager, using("r", A, 0))
    compute_context(manager, using("s", A, 10))
    assert manager.availability().adapter_pages == 2
    free(manager, using("r", A, 0))
    assert manager.availability().adapter_pages == 2
    free(manager, using("s", A, 10))
    assert manager.availability().adapter_pages == 4


def test_what_a_plan_makes_resident_is_told_once() -> None:
    manager = make_set_manager()
    compute_context(manager, using("r", A, 0))
    (load,) = manager.take_adapter_loads()
    assert load.adapter_id == A
    assert tuple(manager.adapter_pages(A)) == load.pages
    free(manager, using("r", A, 0))
    compute_context(manager, using("s", A, 10))
    assert manager.take_adapter_loads() == ()


def test_the_adapter_unpinned_longest_ago_is_evicted_first() -> None:
    manager = make_set_manager()
    for name, adapter, first in (("r", A, 0), ("s", B, 10)):
        compute_context(manager, using(name, adapter, first))
    free(manager, using("s", B, 10))
    free(manager, using("r", A, 0))
    compute_context(manager, using("t", C, 20))
    assert len(manager.adapter_pages(A)) == 2
    with pytest.raises(LogicError, match="not resident"):
        manager.adapter_pages(B)


def test_a_pinned_adapter_is_never_evicted_and_the_refusal_has_the_numbers() -> None:
    manager = make_set_manager(adapter_pages=3)
    compute_context(manager, using("r", A, 0))
    before = manager.snapshot()
    plan = manager.begin_plan()
    refusal = refused(manager.prepare_context(using("s", B, 10)))
    assert (refusal.reason, refusal.needed, refusal.available) == (RefusalReason.OUT_OF_ADAPTER_PAGES, 2, 1)
    plan.rollback()
    assert manager.snapshot() == before


def test_a_savepoint_takes_the_pin_back() -> None:
    manager = make_set_manager()
    plan = manager.begin_plan()
    mark = plan.savepoint()
    granted(manager.prepare_context(using("r", A, 0)))
    assert manager.availability().adapter_pages == 2
    plan.rollback_to(mark)
    assert manager.availability().adapter_pages == 4
    plan.commit()
    assert manager.take_adapter_loads() == ()


def test_a_reverted_request_leaves_no_adapter_behind() -> None:
    manager = make_set_manager()
    request = using("r", A, 0)
    plan = manager.begin_plan()
    granted(manager.prepare_context(request))
    manager.revert_allocate_context(request)
    plan.commit()
    assert manager.availability().adapter_pages == 4
    assert manager.take_adapter_loads() == ()
    manager.audit()


def test_an_adapter_larger_than_the_pool_is_refused_with_both_numbers() -> None:
    with pytest.raises(CacheConfigError, match="needs 5 pages, the pool has 4"):
        AdapterSizes(4, {A: 5})


def test_an_unknown_adapter_is_a_fault_of_the_caller() -> None:
    manager = make_set_manager()
    before = manager.snapshot()
    plan = manager.begin_plan()
    with pytest.raises(LogicError, match="not among the 3"):
        manager.prepare_context(using("r", AdapterId("z"), 0))
    plan.rollback()
    assert manager.snapshot() == before
