"""V16: reuse, rounding, extra tokens, tiers and suspended pages use capacity unseen; here all are in the grant."""

import pytest

from manager import Grant, KVCacheManagerV2, PoolGroupId, TierLevel
from scheduler.request import Request
from tests.divergence.faults import Scene, fault_at_every_call, make_scene, pass_of
from tests.divergence.pressure import requests, two_decodes_before_the_shortage
from tests.fakes.attempts import make_spec

PREFIX = tuple(range(12))
GROUP = PoolGroupId(0)


def build(num_sharers: int = 1) -> Scene:
    """Three blocks are cached, and contexts come that share them."""
    scene = make_scene(num_pages=12)
    scene.worker.context(make_spec("seed", (*PREFIX, 70), max_tokens=1))
    scene.worker.step()
    for number in range(num_sharers):
        scene.worker.context(make_spec(f"s{number}", (*PREFIX, 80 + number), max_tokens=3))
    return scene


def claim(manager: KVCacheManagerV2, request: Request) -> int:
    before = manager.availability().pages[GROUP]
    grant = manager.prepare_context(request)
    assert isinstance(grant, Grant)
    assert before - manager.availability().pages[GROUP] == grant.num_pages(TierLevel.DEVICE)
    return grant.num_pages(TierLevel.DEVICE)


def test_pages_that_a_claim_pins_are_charged_to_the_first_who_pins_them() -> None:
    scene = build(num_sharers=2)
    first, second = scene.worker.scheduler.waiting
    plan = scene.worker.manager.begin_plan()
    assert [claim(scene.worker.manager, first), claim(scene.worker.manager, second)] == [3, 0]
    plan.rollback()


@pytest.mark.parametrize("host_pages", [0, 8])
def test_the_pages_of_a_suspended_request_are_counted_where_they_are(host_pages: int) -> None:
    scene = two_decodes_before_the_shortage(host_pages)
    scene.worker.step()
    older, newer = requests(scene)
    manager = scene.worker.manager
    held = scene.worker.scheduler._shape.num_blocks(manager.capacity(older.request_id))
    assert manager.availability().pages[GROUP] == 5 - held
    assert manager.has_cache(newer.request_id) == manager.is_suspended(newer.request_id)


@pytest.mark.parametrize("num_sharers", [1, 2, 3])
def test_the_budget_equals_the_manager_however_many_share(num_sharers: int) -> None:
    scene = build(num_sharers)
    scene.worker.settle()
    for number in range(num_sharers):
        assert len(scene.worker.tokens[f"s{number}"]) == 3


def test_a_fault_anywhere_in_the_pass_leaves_nothing() -> None:
    assert fault_at_every_call(lambda: build(2), pass_of).count("prepare_context") == 2
