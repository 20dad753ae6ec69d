import pytest

from manager import Availability, Grant, PageCost, PoolGroupId, RequestId, TierLevel
from scheduler.budget import BudgetTracker
from scheduler.errors import BudgetDivergence

FULL, WINDOW = PoolGroupId(0), PoolGroupId(1)
START = Availability(pages={FULL: 10, WINDOW: 6}, index_slots=4, adapter_pages=2)
GRANT = Grant(
    RequestId("a"),
    pages=(
        PageCost(FULL, TierLevel.DEVICE, 3),
        PageCost(WINDOW, TierLevel.DEVICE, 2),
        PageCost(FULL, TierLevel.HOST, 9),
    ),
    index_slots=1,
    adapter_pages=1,
)


def tracker() -> BudgetTracker:
    return BudgetTracker(rows=32, requests=4, availability=START)


def test_a_fresh_budget_equals_the_availability_it_started_from() -> None:
    tracker().reconcile(START)


def test_a_grant_is_charged_in_every_unit_and_only_device_pages_count() -> None:
    budget = tracker()
    budget.commit(GRANT)
    budget.reconcile(Availability(pages={FULL: 7, WINDOW: 4}, index_slots=3, adapter_pages=1))


def test_a_refund_takes_the_whole_charge_back() -> None:
    budget = tracker()
    budget.commit(GRANT)
    budget.refund(GRANT)
    budget.reconcile(START)


@pytest.mark.parametrize(
    "theirs",
    [
        Availability(pages={FULL: 9, WINDOW: 6}, index_slots=4, adapter_pages=2),
        Availability(pages={FULL: 10, WINDOW: 7}, index_slots=4, adapter_pages=2),
        Availability(pages={FULL: 10, WINDOW: 6}, index_slots=3, adapter_pages=2),
        Availability(pages={FULL: 10, WINDOW: 6}, index_slots=4, adapter_pages=1),
        Availability(pages={FULL: 10}, index_slots=4, adapter_pages=2),
    ],
)
def test_a_difference_in_any_unit_is_named(theirs: Availability) -> None:
    with pytest.raises(BudgetDivergence, match="manager"):
        tracker().reconcile(theirs)


def test_restoring_a_mark_brings_every_unit_back_more_than_once() -> None:
    budget = tracker()
    mark = budget.mark()
    for _ in range(2):
        budget.commit(GRANT)
        budget.take_rows(5)
        budget.restore(mark)
        budget.reconcile(START)
        assert (budget.rows, budget.requests) == (32, 4)


def test_a_seat_needs_rows_and_a_place_in_the_batch() -> None:
    budget = BudgetTracker(rows=3, requests=2, availability=START)
    assert budget.has_seat(3)
    assert not budget.has_seat(4)
    budget.take_rows(1)
    budget.take_rows(1)
    assert not budget.has_seat(1)
