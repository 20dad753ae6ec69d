"""n choices of a prompt through the API: the answer of n requests, for the price of one prompt."""

from typing import Any

import pytest

from tests.fakes.door import run_async
from tests.fakes.served_cluster import Serve


@pytest.mark.parametrize("mixed", [True, False], ids=["mixed", "disaggregated"])
def test_a_prompt_with_four_choices_is_computed_and_sent_once(served: Serve, *, mixed: bool) -> None:
    @run_async
    async def check() -> None:
        fields: dict[str, Any] = {"seed": 3, "max_tokens": 5, "ignore_eos": True}
        async with served(mixed=mixed) as cluster:
            one = await cluster.complete("Once upon a time", n=1, **fields)
            before = _transfers(cluster.deployment)
            four = await cluster.complete("Once upon a night, twice", n=4, **fields)
            assert four["usage"]["prompt_tokens"] == len("Once upon a night, twice") + (
                one["usage"]["prompt_tokens"] - len("Once upon a time")
            )
            assert four["usage"]["completion_tokens"] == 4 * 5
            assert _transfers(cluster.deployment) - before == (0 if mixed else 1)
            assert cluster.deployment.central_counts()["shared_contexts"] == 3
            assert cluster.deployment.counts("forks") == 3

    check()


def _transfers(deployment: Any) -> int:
    count: int = deployment.counts("transfers")
    return count
