"""V6: suspend a victim, list it, move the frontier, retry: a fault in between must not lose the victim."""

import pytest

from manager import Refusal, RefusalReason
from scheduler.budget import BudgetTracker
from scheduler.iteration_pass import IterationPass, PassDecisions
from scheduler.request import Request
from tests.divergence.faults import fault_at_every_call, pass_of
from tests.divergence.pressure import is_pushed_out, requests, two_decodes_before_the_shortage
from tests.fakes.call_log import Injected


@pytest.mark.parametrize("host_pages", [0, 8])
def test_a_victim_is_in_exactly_one_place_after_the_pass(host_pages: int) -> None:
    scene = two_decodes_before_the_shortage(host_pages)
    older, newer = requests(scene)
    scene.worker.step()
    here = [*scene.worker.scheduler.running, *scene.worker.scheduler.waiting]
    assert sorted(here, key=lambda request: request.arrival) == [older, newer]
    assert is_pushed_out(newer)
    assert scene.worker.scheduler.get(newer.attempt_id) is newer


def test_no_call_of_the_pass_can_lose_the_victim() -> None:
    calls = 0
    while True:
        scene = two_decodes_before_the_shortage()
        everybody = requests(scene)
        scene.log.aim(raise_in=calls)
        try:
            scene.worker.schedule()
        except Injected:
            assert requests(scene) == everybody
            assert not any(is_pushed_out(request) for request in everybody)
            calls += 1
        else:
            break
    assert calls > 3


@pytest.mark.parametrize("host_pages", [0, 8])
@pytest.mark.parametrize("in_the_end", ["refused", "wants nothing"])
def test_victims_that_did_not_help_come_back_with_the_savepoint(host_pages: int, in_the_end: str) -> None:
    scene = two_decodes_before_the_shortage(host_pages)
    older, newer = requests(scene)
    manager = scene.worker.manager
    transaction = manager.begin_plan()
    budget = BudgetTracker(rows=8, requests=4, availability=manager.availability())
    plan = IterationPass(manager, transaction, budget, PassDecisions())
    before = manager.snapshot()
    refusal = Refusal(older.request_id, RefusalReason.OUT_OF_PAGES, 99, 0)
    seen: list[bool] = []

    def attempt(_: Request) -> Refusal | None:
        seen.append(plan.is_pushed_out(newer))
        return None if len(seen) == 2 and in_the_end == "wants nothing" else refusal

    answer: object = plan.try_with_victims(older, attempt, lambda: [newer])
    assert answer is (refusal if in_the_end == "refused" else None)
    assert seen == [False, True]
    assert not plan.decisions.pushed_out
    assert manager.snapshot() == before
    budget.reconcile(manager.availability())
    transaction.rollback()


def test_a_fault_anywhere_in_the_pass_leaves_nothing() -> None:
    assert "pause_for_recompute" in fault_at_every_call(two_decodes_before_the_shortage, pass_of)
