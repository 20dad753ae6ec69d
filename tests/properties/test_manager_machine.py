"""KVCacheManagerV2 against a naive model, with the audit after every call and real page contents."""

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from tests.properties.manager_machine import ManagerMachine


def test_random_calls_agree_with_the_naive_model() -> None:
    run_state_machine_as_test(ManagerMachine, settings=settings(max_examples=100, stateful_step_count=50))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_random_calls_agree_with_the_naive_model() -> None:
    run_state_machine_as_test(
        ManagerMachine,
        settings=settings(max_examples=2000, stateful_step_count=60, derandomize=False, print_blob=True),
    )
