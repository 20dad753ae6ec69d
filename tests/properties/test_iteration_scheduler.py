"""The iteration scheduler over the real manager, against everything that can happen to a request."""

import random
import sys
import time

import pytest
from hypothesis import seed, settings
from hypothesis.stateful import run_state_machine_as_test

from configs import SchedulerConfig
from configs.scheduling import ChunkingPolicy
from scheduler.messages import WorkerRole
from tests.fakes.small_cache import Members
from tests.properties.iteration_machine import Arrival, IterationMachine, Sizes

EXAMPLES_A_SEED = 200
MIN_EXAMPLES, MAX_EXAMPLES = 2_000, 10_000
SECONDS = 20 * 60


def test_every_request_ends_once_and_nothing_is_held_at_the_end() -> None:
    run_state_machine_as_test(IterationMachine, settings=settings(max_examples=100, stateful_step_count=40))
    _assert_reached("deferrals", "recomputes", "abandoned_steps", "refused", "rollbacks")


def _assert_reached(*kinds: str) -> None:
    reached = IterationMachine.totals
    assert [kind for kind in kinds if not reached[kind]] == [], f"not reached by any example: {dict(reached)}"


@pytest.mark.slow
@pytest.mark.timeout(2 * SECONDS)
def test_many_fresh_seeds_end_every_request_once(capsys: pytest.CaptureFixture[str]) -> None:
    """Fresh seeds for twenty minutes; a failing one is printed, to become a test."""
    started_s = time.monotonic()
    examples = 0
    while examples < MAX_EXAMPLES and (time.monotonic() - started_s < SECONDS or examples < MIN_EXAMPLES):
        number = random.SystemRandom().getrandbits(32)
        with capsys.disabled():
            sys.stderr.write(f"\nexamples so far {examples}, next seed {number}")
        machine = seed(number)(type("SeededMachine", (IterationMachine,), {}))
        chosen = settings(max_examples=EXAMPLES_A_SEED, stateful_step_count=40, derandomize=False)
        run_state_machine_as_test(machine, settings=chosen)
        examples += EXAMPLES_A_SEED
    # Two of one prefix, one of them computing: too rare for a hundred examples.
    _assert_reached("duplicate_deferrals", "suspensions", "resumes")


def test_pages_that_a_suspended_request_has_on_the_device_stop_nobody_for_ever() -> None:
    """It shared them with one that has ended since; then whoever runs alone needs the last one (S5)."""
    machine = IterationMachine()
    members = Members(draft=False, draft_padding=2, cross=True, adapter_pages=4)
    config = SchedulerConfig(
        max_num_tokens=16,
        max_batch_size=6,
        chunk_unit_tokens=1,
        chunking=ChunkingPolicy.EQUAL_PROGRESS,
        arrivals_per_priority=4,
        defer_duplicate_prefixes=False,
    )
    sizes = Sizes(num_pages=6, max_sequences=6, host_pages=3, resume_watermark=0.4, members=members, config=config)
    machine.start(chosen=sizes, role=WorkerRole.GENERATION)
    machine.arrive([Arrival(0, 20, 0, 0, 1, 1, is_offer=True, adapter=None, encoder=1)])
    machine.arrive([Arrival(0, 50, 0, 0, 2, 0, is_offer=False, adapter=None, encoder=8)])
    machine.cancel(fails=False, pick=411)
    machine.cancel(fails=False, pick=1503)
    machine.arrive(
        [
            Arrival(40, 20, 0, 1, 1, 0, is_offer=True, adapter="a", encoder=0),
            Arrival(5, 100, 0, 2, 2, 3, is_offer=True, adapter="a", encoder=8),
        ]
    )
    machine.arrive(
        [
            Arrival(20, 0, 0, 1, -1, 2, is_offer=False, adapter=None, encoder=0),
            Arrival(60, 100, 0, 0, 2, 4, is_offer=False, adapter=None, encoder=4),
            Arrival(40, 100, 0, 0, 1, 1, is_offer=False, adapter=None, encoder=4),
        ]
    )
    machine.teardown()  # runs them to their ends within the bound, and checks the baseline
