"""Where requests have drafts and adapters, the switches about them act, and ours still agrees with its manager."""

import pytest

from tests.baselines.member_run import run_members
from tests.baselines.switches import Switch

SEEDS = range(3)


@pytest.mark.parametrize("seed", SEEDS)
def test_ours_strands_nothing_of_any_member_while_it_suspends(seed: int) -> None:
    ours = run_members(seed, None)
    assert ours.suspensions > 0
    assert ours.stranded_page_iterations == ours.audit_violations == 0
    assert ours.has_ended
    assert run_members(seed, ()) == ours, "with no switch on every decision is ours"


@pytest.mark.parametrize("seed", SEEDS)
def test_padding_that_the_budget_does_not_see_makes_it_differ_from_the_manager(seed: int) -> None:
    assert run_members(seed, {Switch.V19}).divergent_budgets > 0


@pytest.mark.parametrize("seed", SEEDS)
def test_adapters_that_suspended_requests_keep_are_pins_of_nobody(seed: int) -> None:
    assert run_members(seed, {Switch.V20}).corrupted > 0
