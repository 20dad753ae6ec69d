"""The iteration scheduler over the real manager, against everything that can happen to a request."""

import random
import sys
import time

import pytest
from hypothesis import seed, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.properties.iteration_machine import IterationMachine

EXAMPLES_A_SEED = 200
MIN_EXAMPLES, MAX_EXAMPLES = 2_000, 10_000
SECONDS = 20 * 60


def test_every_request_ends_once_and_nothing_is_held_at_the_end() -> None:
    run_state_machine_as_test(IterationMachine, settings=settings(max_examples=100, stateful_step_count=40))
    reached = IterationMachine.totals
    for kind in ("deferrals", "recomputes", "abandoned_steps", "duplicate_deferrals", "refused", "rollbacks"):
        assert reached[kind] > 0, f"no example reached {kind}: {dict(reached)}"


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
