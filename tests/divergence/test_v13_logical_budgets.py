"""V13: elsewhere the budget counts logical tokens and requests; here pages per pool group, as granted."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from manager import Grant, Refusal, TierLevel
from scheduler.errors import BudgetDivergence
from tests.divergence.faults import Scene, fault_at_every_call, make_scene, pass_of
from tests.divergence.lying_manager import LyingManager
from tests.fakes.attempts import make_spec
from tests.fakes.iteration_worker import make_worker


def round_down(grant: Grant) -> Grant:
    """A manager that forgets to count the page that rounding added."""
    return replace(grant, pages=tuple(replace(cost, pages=cost.pages - 1) for cost in grant.pages))


def no_index_slot(grant: Grant) -> Grant:
    return replace(grant, index_slots=0)


def an_adapter_page(grant: Grant) -> Grant:
    return replace(grant, adapter_pages=1)


@pytest.mark.parametrize("lie", [round_down, no_index_slot, an_adapter_page])
def test_a_grant_that_names_less_or_more_than_it_cost_ends_the_pass(lie: Callable[[Grant], Grant]) -> None:
    honest = make_worker()
    before = honest.manager.snapshot()
    worker = make_worker(wrap=lambda manager: LyingManager(manager, lie))
    request = worker.context(make_spec("x", 6))
    with pytest.raises(BudgetDivergence, match="budget has"):
        worker.schedule()
    assert worker.manager.snapshot() == before
    assert worker.scheduler.waiting == [request]


def test_each_grant_is_what_availability_lost() -> None:
    scene = make_scene(num_pages=16)
    manager = scene.worker.manager
    request = scene.worker.context(make_spec("x", 6, max_tokens=4))
    plan = manager.begin_plan()
    calls: list[Callable[[], Grant | Refusal]] = [
        lambda: manager.prepare_context(request),
        lambda: manager.resize_context(request, 6),
    ]
    for call in calls:
        before = manager.availability()
        grant = call()
        assert isinstance(grant, Grant)
        after = manager.availability()
        for group, pages in before.pages.items():
            charged = sum(
                cost.pages for cost in grant.pages if cost.tier is TierLevel.DEVICE and cost.pool_group == group
            )
            assert pages - after.pages[group] == charged
        assert before.index_slots - after.index_slots == grant.index_slots
    plan.rollback()


def build() -> Scene:
    """Three contexts whose pages are each partly empty."""
    scene = make_scene()
    for name in "abc":
        scene.worker.context(make_spec(name, 5, max_tokens=3))
    return scene


def test_a_fault_anywhere_in_the_pass_leaves_nothing() -> None:
    assert fault_at_every_call(build, pass_of).count("resize_context") == 3
