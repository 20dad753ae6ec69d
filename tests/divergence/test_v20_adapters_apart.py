"""V20: adapter pages are accounted apart elsewhere; here they are a unit of the budget like any other."""

from dataclasses import replace

import pytest

from manager import Availability, Grant, PoolGroupId, RequestId
from scheduler.budget import BudgetTracker
from scheduler.errors import BudgetDivergence, InvalidRequest
from scheduler.iteration_pass import IterationPass, PassDecisions
from tests.divergence.faults import Scene, fault_at_every_call, make_scene, pass_of
from tests.divergence.lying_manager import LyingManager
from tests.divergence.pressure import requests, two_decodes_before_the_shortage, two_sets_before_the_shortage
from tests.fakes.attempts import make_spec
from tests.fakes.iteration_worker import make_worker
from tests.fakes.small_cache import EVERY_MEMBER

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


def test_a_suspended_request_holds_no_adapter_and_asks_for_it_again() -> None:
    scene = two_sets_before_the_shortage(20)
    manager = scene.worker.manager
    _, newer = requests(scene)
    scene.worker.step()
    assert manager.is_suspended(newer.request_id)
    assert manager.availability().adapter_pages == 1
    while manager.is_suspended(newer.request_id):
        scene.worker.step()
    assert manager.availability().adapter_pages == 3 - 1
    scene.worker.settle()
    assert manager.availability().adapter_pages == 3


def test_while_adapter_pages_are_short_only_holders_of_another_adapter_are_pushed_out() -> None:
    scene = make_scene(num_pages=16, host_pages=40, members=EVERY_MEMBER)
    worker = scene.worker
    with_b = worker.context(make_spec("with-b", 5, max_tokens=6, adapter="b"))
    without = worker.context(make_spec("without", 5, max_tokens=6))
    worker.step()
    first = worker.context(make_spec("first", 5, max_tokens=3, adapter="a", priority=9))
    worker.step()
    assert worker.scheduler.waiting == [first], "a context pushes out no generation"
    plan = IterationPass(
        worker.manager,
        worker.manager.begin_plan(),
        BudgetTracker(rows=8, requests=4, availability=worker.manager.availability()),
        PassDecisions(),
    )
    answer = plan.try_with_victims(first, worker.manager.prepare_context, lambda: [without, with_b])
    assert isinstance(answer, Grant)
    assert answer.adapter_pages == 2
    assert [victim for victim, _ in plan.decisions.pushed_out.values()] == [with_b]


def test_requests_that_share_too_few_adapter_pages_all_end() -> None:
    scene = make_scene(num_pages=16, members=EVERY_MEMBER)
    for name, adapter in (("r1", "a"), ("r2", "b"), ("r3", "c"), ("r4", "a"), ("r5", None)):
        scene.worker.context(make_spec(name, 6, max_tokens=4, adapter=adapter))
    scene.worker.settle()
    assert {len(tokens) for tokens in scene.worker.tokens.values()} == {4}
    assert scene.worker.manager.availability().adapter_pages == 3


def test_an_adapter_or_encoder_input_without_a_place_here_is_refused_at_arrival() -> None:
    worker = make_scene(members=EVERY_MEMBER).worker
    with pytest.raises(InvalidRequest, match="no adapter z"):
        worker.context(make_spec("x", 6, adapter="z"))
    with pytest.raises(InvalidRequest, match="9 encoder tokens, this worker has room for 8"):
        worker.context(make_spec("x", 6, encoder=tuple(range(9))))
    assert not worker.scheduler.waiting


@pytest.mark.parametrize("passes", [0, 1, 6])
def test_a_fault_anywhere_in_a_pass_that_moves_adapters_leaves_nothing(passes: int) -> None:
    """A claim with its adapter; then a suspension, and the resume that asks for it again."""

    def build_set() -> Scene:
        scene = two_sets_before_the_shortage(20)
        for _ in range(passes):
            scene.worker.step()
        return scene

    def build_first() -> Scene:
        scene = make_scene(members=EVERY_MEMBER)
        scene.worker.context(make_spec("x", 6, max_tokens=2, adapter="a", encoder=(1, 2)))
        return scene

    assert "try_allocate_generation" in fault_at_every_call(build_set, pass_of)
    assert "prepare_context" in fault_at_every_call(build_first, pass_of)
