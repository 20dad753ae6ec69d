"""best_of: the likeliest choices of each prompt, best first."""

from typing import Any

from tests.fakes.door import run_async
from tests.fakes.served_cluster import Serve


@run_async
async def test_the_likeliest_choices_of_each_prompt_are_returned(served: Serve) -> None:
    fields: dict[str, Any] = {"seed": 9, "max_tokens": 6, "logprobs": 0, "ignore_eos": True}
    prompts = ["Once upon", "the sea"]
    async with served() as cluster:
        drawn = await cluster.complete(prompts, n=4, **fields)
        best = await cluster.complete(prompts, n=2, best_of=4, **fields)
        unscored = await cluster.complete(prompts, n=2, best_of=4, **{**fields, "logprobs": None})

    def likelihood(choice: dict[str, Any]) -> float:
        total: float = sum(choice["logprobs"]["token_logprobs"])
        return total

    expected = [
        choice["text"]
        for first in (0, 4)
        for choice in sorted(drawn["choices"][first : first + 4], key=likelihood, reverse=True)[:2]
    ]
    assert [choice["text"] for choice in best["choices"]] == expected
    assert [choice["text"] for choice in unscored["choices"]] == expected
    assert [choice["index"] for choice in best["choices"]] == [0, 1, 2, 3]
    assert all(choice["logprobs"] is None for choice in unscored["choices"])
    # All that was drawn is counted.
    assert best["usage"]["completion_tokens"] == 2 * 4 * 6
