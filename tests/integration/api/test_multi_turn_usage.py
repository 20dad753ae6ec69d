"""A conversation through the API: usage says what was cached, and answers are those of a mixed worker."""

from pathlib import Path
from typing import Any

from tests.fakes.door import run_async
from tests.fakes.served_cluster import Serve, ServedCluster, serve, small_config

_BLOCK = 16
_NUM_TOKENS = 20
_TURNS = 5


async def _chat(cluster: ServedCluster) -> list[dict[str, Any]]:
    """Usage of each turn, its text beside it."""
    text = "the sea and the river, " * 5
    usages = []
    for turn in range(_TURNS):
        answer = await cluster.complete(text, temperature=0, ignore_eos=True, max_tokens=_NUM_TOKENS)
        said = answer["choices"][0]["text"]
        usages.append({**answer["usage"], "text": said})
        # Only what tokens spell exactly can be said again; the tiny model also draws bytes that are no text.
        text += "".join(letter for letter in said if letter.isascii()) + f" and then {turn}?"
    return usages


@run_async
async def test_usage_of_a_turn_counts_the_earlier_ones_as_cached(
    served: Serve, model_folder: Path, tmp_path: Path
) -> None:
    async with serve(small_config(mixed=False, local_prefill=64), model_folder, tmp_path) as cluster:
        disaggregated = await _chat(cluster)
        assert cluster.deployment.cluster.central.state(0.0)["routing"]["local_prefills"] >= _TURNS - 2
    known = 0
    for usage in disaggregated:
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        # At least the earlier prompt: what was said may read differently when it is tokenised again.
        assert known - _BLOCK <= cached < usage["prompt_tokens"]
        known = usage["prompt_tokens"]
    async with served(mixed=True) as cluster:
        mixed = await _chat(cluster)
    assert [usage["text"] for usage in mixed] == [usage["text"] for usage in disaggregated]
