"""V20: adapter pages are accounted apart elsewhere; here they are a unit of the budget like any other."""

from dataclasses import replace

import pytest

from manager import Availability, Grant, PoolGroupId, RequestId
from scheduler.budget import BudgetTracker
from scheduler.errors import BudgetDivergence
from tests.divergence.faults import Scene, fault_at_every_call, make_scene, pass_of
from tests.divergence.lying_manager import LyingManager
from tests.divergence.pressure import two_decodes_before_the_shortage
from tests.fakes.attempts import make_spec
from tests.fakes.iteration_worker import make_worker

START = Availability(pages={PoolGroupId(0): 4}, index_slots=2, adapter_pages=3)
GRANT = Grant(RequestId("a"), adapter_pages=2)


def test_adapter_pages_come_back_with_the_mark_like_every_other_unit() -> None:
    budget = BudgetTracker(rows=4, requests=2, availability=START)
    mark = budget.mark()
    budget.commit(GRANT)
    budget.reconcile(replace(START, adapter_pages=1))
    budget.restore(mark)
    budget.reconcile(START)


def test_adapter_pages_that_a_suspension_released_are_taken_over_from_the_manager() -> None:
    budget = BudgetTracker(rows=4, requests=2, availability=START)
    budget.commit(GRANT)
    budget.restart(START)
    assert budget.adapter_pages == 3


def test_an_adapter_page_that_the_manager_did_not_lose_ends_the_pass() -> None:
    worker = make_worker(wrap=lambda manager: LyingManager(manager, lambda grant: replace(grant, adapter_pages=1)))
    worker.context(make_spec("x", 6))
    with pytest.raises(BudgetDivergence):
        worker.schedule()


def test_a_fault_anywhere_in_the_pass_leaves_nothing() -> None:
    def build() -> Scene:
        scene = make_scene()
        scene.worker.context(make_spec("x", 6, max_tokens=2))
        return scene

    assert "prepare_context" in fault_at_every_call(build, pass_of)
    assert "suspend_request" in fault_at_every_call(two_decodes_before_the_shortage, pass_of)
