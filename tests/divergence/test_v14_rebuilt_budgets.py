"""V14: elsewhere the budget is rebuilt while the manager goes on; here both start in one transaction."""

from typing import Any

import pytest

from manager import KVCacheManager
from scheduler.errors import BudgetDivergence
from scheduler.messages import WorkerRole
from tests.divergence.faults import Scene, fault_at_every_call, make_scene, pass_of
from tests.divergence.lying_manager import ShiftingManager
from tests.fakes.attempts import make_spec
from tests.fakes.iteration_worker import make_worker


def test_a_manager_that_changes_under_the_pass_ends_it() -> None:
    worker = make_worker(wrap=ShiftingManager)
    worker.context(make_spec("x", 6))
    with pytest.raises(BudgetDivergence):
        worker.schedule()
    assert len(worker.scheduler.waiting) == 1
    worker.manager.audit()


def test_the_look_is_taken_inside_the_plan() -> None:
    order: list[str] = []

    class Watching:
        def __init__(self, manager: KVCacheManager) -> None:
            self._manager = manager

        def __getattr__(self, name: str) -> Any:
            order.append(name)
            return getattr(self._manager, name)

    worker = make_worker(wrap=Watching)
    worker.context(make_spec("x", 6))
    order.clear()
    worker.schedule()
    assert order.index("begin_plan") < order.index("availability")
    assert order[-1] == "availability"


def build() -> Scene:
    """Between two passes a lease ends, a context arrives and a request is cancelled."""
    scene = make_scene(WorkerRole.CONTEXT, num_pages=6)
    scene.worker.context(make_spec("leased", 12))
    scene.worker.step()
    scene.worker.context(make_spec("waiting", 16))
    scene.worker.step()
    scene.worker.scheduler.on_lease_ended(scene.worker.leases.pop("leased"), 0.0, settled=True)
    scene.worker.context(make_spec("cancelled", 4))
    scene.worker.scheduler.cancel(scene.worker.scheduler.waiting[-1].attempt_id, 0.0)
    return scene


def test_what_happened_between_two_passes_is_in_the_next_budget() -> None:
    scene = build()
    [chunk] = scene.worker.step().contexts
    assert (chunk.request.attempt_id, chunk.num_tokens) == ("waiting", 16)


def test_a_fault_anywhere_in_the_pass_leaves_nothing() -> None:
    assert "resize_context" in fault_at_every_call(build, pass_of)
