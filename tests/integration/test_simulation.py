"""Whole deployments in virtual time: deterministic, audited every pass, and exact under faults."""

import json
from dataclasses import replace

import pytest

from configs import CentralConfig, ClusterConfig, SchedulerConfig
from configs.scheduling import DispatchPolicy
from serving import cli
from serving.simulation.arrivals import random_arrivals
from serving.simulation.cost_model import DECODE_BOUND
from serving.simulation.deployment import SimulatedDeployment, SimulationError
from serving.simulation.results import SimulationResults, summarize
from serving.simulation.settings import FaultSettings, SimulationSettings

SETTINGS = SimulationSettings(
    cluster=ClusterConfig(context_workers=2, generation_workers=2),
    scheduler=SchedulerConfig(max_batch_size=32),
    cost=DECODE_BOUND,
    tokens_per_block=4,
    pages_per_context_worker=120,
    pages_per_generation_worker=120,
)


def _run(settings: SimulationSettings, num_requests: int = 60, rate_per_s: float = 40.0) -> SimulationResults:
    deployment = SimulatedDeployment(settings)
    deployment.run(random_arrivals(num_requests, rate_per_s, settings.seed, mean_tokens=(40, 24)))
    return summarize(deployment)


def test_the_same_seed_gives_the_same_result_to_the_last_digit() -> None:
    faults = FaultSettings(transfer_failure_share=0.1, worker_deaths=1, death_window_s=2.0, restart_s=1.0)
    settings = replace(SETTINGS, faults=faults, seed=5)
    one, again = _run(settings), _run(settings)
    assert one == again
    assert one.digest != _run(replace(settings, seed=6)).digest


def test_pools_too_small_for_the_load_suspend_and_everything_still_ends() -> None:
    results = _run(replace(SETTINGS, pages_per_generation_worker=80, host_pages=200), rate_per_s=200.0)
    assert results.failed == 0
    assert results.suspensions > 0
    assert results.resumes > 0
    assert results.deferrals > 0
    assert results.audits >= results.passes
    assert results.page_occupancy["generation"]["peak"] > 0.9


def test_without_a_lower_tier_requests_are_computed_again() -> None:
    results = _run(replace(SETTINGS, pages_per_generation_worker=80), rate_per_s=200.0)
    assert results.failed == 0
    assert results.recomputes > 0
    assert results.suspensions == 0


@pytest.mark.parametrize("seed", range(4))
def test_faults_cost_time_and_no_token(seed: int) -> None:
    faults = FaultSettings(
        transfer_failure_share=0.05,
        transfer_stall_share=0.05,
        transfer_stall_s=12.0,
        step_failure_share=0.01,
        worker_deaths=3,
        death_window_s=3.0,
    )
    results = _run(replace(SETTINGS, faults=faults, seed=seed))
    assert results.failed == 0
    assert results.worker_deaths > 0
    assert results.failed_transfers > 0
    assert results.resubmissions + results.retries > 0


def test_generation_first_dispatch_and_mixed_workers_are_simulated_too() -> None:
    central = CentralConfig(dispatch=DispatchPolicy.GENERATION_FIRST)
    assert _run(replace(SETTINGS, central=central), num_requests=20).failed == 0
    mixed = ClusterConfig(context_workers=0, generation_workers=0, mixed_workers=2)
    results = _run(replace(SETTINGS, cluster=mixed), num_requests=20)
    assert results.failed == 0
    assert results.transfers == 0


def test_a_run_that_takes_too_long_says_what_is_open() -> None:
    with pytest.raises(SimulationError, match="requests are open"):
        _run(replace(SETTINGS, limit_s=0.5))


def test_the_command_prints_every_number(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["simulate", "--requests", "10", "--context-workers", "1", "--generation-workers", "1", "--seed", "2"]
    assert cli.main([*options, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["requests"] == 10
    assert {"ttft_s", "tpot_s", "makespan_s", "suspensions", "recomputes", "deferrals", "passes"} <= printed.keys()
    assert cli.main(options) == 0
    assert f"digest                           {printed['digest']}" in capsys.readouterr().out


def test_the_command_names_a_trace_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["simulate", "--trace", "/nowhere/trace.jsonl"]) == 1
    assert "/nowhere/trace.jsonl" in capsys.readouterr().err
