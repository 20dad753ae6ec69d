"""V8: suspending what is absent or inactive is a silent no-op elsewhere; here it is an error, and never asked for."""

import pytest

from manager import CorruptedError, LogicError
from manager.cache_chain import CacheStatus
from tests.divergence.faults import fault_at_every_call, pass_of
from tests.divergence.pressure import requests, two_decodes_before_the_shortage, two_sets_before_the_shortage
from tests.fakes.attempts import make_request


def test_suspending_a_request_without_a_cache_is_an_error() -> None:
    manager = two_decodes_before_the_shortage().worker.manager
    transaction = manager.begin_plan()
    before = manager.snapshot()
    for call in (manager.suspend_request, manager.pause_for_recompute, manager.try_allocate_generation):
        with pytest.raises(LogicError):
            call(make_request("nobody"))
    assert manager.snapshot() == before
    transaction.rollback()


def test_a_request_pushed_out_in_a_plan_cannot_be_pushed_out_again_in_it() -> None:
    scene = two_decodes_before_the_shortage()
    _, newer = requests(scene)
    manager = scene.worker.manager
    transaction = manager.begin_plan()
    manager.pause_for_recompute(newer)
    with pytest.raises(LogicError):
        manager.suspend_request(newer)
    transaction.rollback()
    manager.audit()


@pytest.mark.parametrize("host_pages", [0, 8])
def test_the_scheduler_pushes_each_victim_out_once_and_never_one_without_pages(host_pages: int) -> None:
    """LogicError would end the pass; three rounds of shortage run without one."""
    scene = two_decodes_before_the_shortage(host_pages)
    scene.worker.settle()
    stops = scene.log.calls.count("suspend_request")
    assert stops >= 1
    counters = scene.worker.scheduler.counters()
    assert counters["suspensions"] + counters["recomputes"] <= stops


def test_a_fault_anywhere_in_the_pass_leaves_nothing() -> None:
    assert "suspend_request" in fault_at_every_call(two_decodes_before_the_shortage, pass_of)


@pytest.mark.parametrize("host_pages", [0, 20])
def test_the_members_of_every_set_have_one_state_after_every_pass(host_pages: int) -> None:
    scene = two_sets_before_the_shortage(host_pages)
    manager = scene.worker.manager
    while scene.worker.scheduler.has_work:
        scene.worker.step()
        manager.audit()
        for caches in manager._caches.by_request.values():
            assert {member.status for member in caches.members} == {caches.status}
            assert (caches.index_slot >= 0) == (not caches.is_suspended)


def test_members_that_drift_apart_are_found_by_the_audit() -> None:
    manager = two_sets_before_the_shortage(20).worker.manager
    caches = next(iter(manager._caches.by_request.values()))
    assert caches.cross is not None
    caches.cross.status = CacheStatus.SUSPENDED
    with pytest.raises(CorruptedError):
        manager.audit()
    caches.cross.status = CacheStatus.ACTIVE
    manager.audit()


def test_a_fault_anywhere_in_a_pass_over_sets_leaves_nothing() -> None:
    assert "suspend_request" in fault_at_every_call(two_sets_before_the_shortage, pass_of)
