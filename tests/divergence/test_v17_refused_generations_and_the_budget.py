"""V17: a refused generation resumes a cache or notes metadata while the budget notes nothing; here neither does."""

import pytest

from manager import Grant, Refusal
from tests.divergence.faults import Scene, fault_at_every_call, make_scene, pass_of
from tests.divergence.pressure import requests, two_decodes_before_the_shortage
from tests.fakes.attempts import make_spec


def build(host_pages: int = 0) -> Scene:
    """The newer decode was pushed out and the older one fills the pool: coming back is refused every pass."""
    scene = make_scene(num_pages=4, host_pages=host_pages)
    scene.worker.context(make_spec("older", 7, max_tokens=9))
    scene.worker.context(make_spec("newer", 7, max_tokens=4))
    for _ in range(3):
        scene.worker.step()
    assert requests(scene)[1] not in scene.worker.outputs[-1].generations
    return scene


@pytest.mark.parametrize("host_pages", [0, 8])
def test_every_refusal_of_a_return_changes_nothing(host_pages: int) -> None:
    scene = build(host_pages)
    older, newer = requests(scene)
    while older in scene.worker.scheduler.running and not newer.is_terminal:
        is_suspended = scene.worker.manager.is_suspended(newer.request_id)
        output = scene.worker.step()
        if newer in output.generations or any(chunk.request is newer for chunk in output.contexts):
            break
        assert scene.worker.manager.is_suspended(newer.request_id) == is_suspended
        assert scene.worker.manager.has_cache(newer.request_id) == is_suspended
    assert scene.worker.outputs[-1].generations == (older,) or older.is_terminal


def test_the_managers_refusal_costs_nothing() -> None:
    scene = two_decodes_before_the_shortage()
    older, newer = requests(scene)
    manager = scene.worker.manager
    plan = manager.begin_plan()
    assert isinstance(manager.try_allocate_generation(older), Grant)
    before, available = manager.snapshot(), manager.availability()
    assert isinstance(manager.try_allocate_generation(newer), Refusal)
    assert manager.snapshot() == before
    assert manager.availability() == available
    plan.rollback()


@pytest.mark.parametrize("host_pages", [0, 8])
def test_a_fault_anywhere_in_the_pass_leaves_nothing(host_pages: int) -> None:
    assert "try_allocate_generation" in fault_at_every_call(lambda: build(host_pages), pass_of)
