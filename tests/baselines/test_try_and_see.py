"""The baseline is ours with every switch off, and comes apart from its manager with any that can act."""

from collections.abc import Collection
from dataclasses import replace

import pytest

from configs import ClusterConfig, SchedulerConfig
from scheduler.central_routing import HAND_EVERYTHING_OVER
from serving.simulation.arrivals import random_arrivals
from serving.simulation.cost_model import DECODE_BOUND
from serving.simulation.settings import SimulationSettings
from tests.baselines.comparison import Outcome, run_side
from tests.baselines.switches import ALL, INERT, Switch

SETTINGS = SimulationSettings(
    cluster=ClusterConfig(context_workers=2, generation_workers=2),
    scheduler=SchedulerConfig(max_batch_size=64),
    router=HAND_EVERYTHING_OVER,
    cost=DECODE_BOUND,
    tokens_per_block=4,
    pages_per_context_worker=120,
    pages_per_generation_worker=90,
    host_pages=150,
    audit_every=10,
    limit_s=300.0,
)


def _run(switches: Collection[Switch] | None) -> Outcome:
    return run_side(SETTINGS, random_arrivals(100, 200.0, 1, mean_tokens=(40, 40)), switches)


@pytest.fixture(scope="module")
def ours() -> Outcome:
    return _run(None)


def test_ours_strands_nothing_and_agrees_with_its_manager_while_it_suspends(ours: Outcome) -> None:
    assert ours.suspensions > 0
    assert ours.stranded_page_iterations == 0
    assert ours.audit_violations == 0


def test_with_no_switch_on_every_decision_is_ours(ours: Outcome) -> None:
    assert _run(()) == ours


def test_with_all_switches_on_pages_are_stranded_and_the_two_disagree(ours: Outcome) -> None:
    outcome = _run(ALL)
    assert outcome.stranded_page_iterations > 0
    assert outcome.divergent_budgets > 0
    assert outcome.disagreements > 0
    assert outcome.failed == ours.failed == 1, "one is longer than any pool, and refused at the door"


@pytest.mark.parametrize("switch", [Switch.V1, Switch.V2, Switch.V3, Switch.V5, Switch.V10, Switch.V17])
def test_what_a_failed_attempt_keeps_is_stranded(switch: Switch) -> None:
    assert _run({switch}).stranded_page_iterations > 0


@pytest.mark.parametrize("switch", [Switch.V13, Switch.V14, Switch.V16])
def test_a_budget_that_estimates_differs_from_the_manager(switch: Switch) -> None:
    outcome = _run({switch})
    assert outcome.divergent_budgets > 0
    assert outcome.stranded_page_iterations == 0


@pytest.mark.parametrize("switch", [Switch.V6, Switch.V8])
def test_suspensions_for_nothing_are_more_suspensions(switch: Switch, ours: Outcome) -> None:
    assert _run({switch}).suspensions > ours.suspensions


def test_an_init_without_the_first_decodes_place_changes_what_follows(ours: Outcome) -> None:
    assert _run({Switch.V18}).digest != ours.digest


def test_reverts_that_free_outright_act_where_contexts_and_decodes_share_a_worker() -> None:
    settings = replace(
        SETTINGS,
        cluster=ClusterConfig(context_workers=0, generation_workers=0, mixed_workers=2),
        scheduler=SchedulerConfig(max_batch_size=64, max_num_tokens=32, chunk_unit_tokens=8),
    )
    arrivals = random_arrivals(60, 200.0, 1, mean_tokens=(40, 40))
    ours, other = run_side(settings, arrivals, None), run_side(settings, arrivals, {Switch.V11})
    assert ours.stranded_page_iterations == ours.audit_violations == 0
    assert other.digest != ours.digest


def test_switches_that_cannot_act_here_change_nothing(ours: Outcome) -> None:
    assert _run(INERT.keys()) == ours
