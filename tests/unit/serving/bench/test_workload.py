"""Jobs from a seed, and the search for a rate."""

import asyncio
import json
from pathlib import Path

import pytest

from serving.bench.goodput import Targets, bisect_rate
from serving.bench.load import Lengths, ResultsFile, Sample, closed_jobs, long_prompt_jobs, poisson_jobs, trace_jobs
from serving.bench.load.summary import percentile, summarize

_LENGTHS = Lengths(3, 9), Lengths(2, 2)


def test_the_same_seed_gives_the_same_jobs_and_another_seed_others() -> None:
    assert closed_jobs(5, *_LENGTHS, seed=1) == closed_jobs(5, *_LENGTHS, seed=1)
    assert closed_jobs(5, *_LENGTHS, seed=1) != closed_jobs(5, *_LENGTHS, seed=2)
    assert {3 <= len(job.token_ids) <= 9 for job in closed_jobs(50, *_LENGTHS, seed=1)} == {True}


def test_prompts_do_not_depend_on_the_rate_and_arrivals_scale_with_it() -> None:
    slow, fast = (poisson_jobs(400, rate, *_LENGTHS, seed=3) for rate in (1.0, 4.0))
    assert [job.token_ids for job in slow] == [job.token_ids for job in fast]
    assert slow[-1].due_s == pytest.approx(4 * fast[-1].due_s)
    assert 300 < slow[-1].due_s < 500


def test_long_prompts_come_at_regular_times() -> None:
    jobs = long_prompt_jobs(seconds=12.0, every_s=4.0, prompt=20, output=2, seed=0)
    assert [job.due_s for job in jobs] == [2.0, 6.0, 10.0]
    assert {len(job.token_ids) for job in jobs} == {20}
    assert len({job.token_ids for job in jobs}) == 3


def test_equal_hash_ids_of_a_trace_are_equal_blocks(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 0, "input_length": 1_100, "output_length": 64, "hash_ids": [0, 1, 2]},
        {"timestamp": 3_000, "input_length": 1_600, "output_length": 5, "hash_ids": [0, 1, 7, 8]},
    ]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(map(json.dumps, rows)))
    first, second = trace_jobs(trace, count=9, scale=16, speed=2.0)
    assert (len(first.token_ids), len(second.token_ids)) == (68, 100)
    assert first.token_ids[:64] == second.token_ids[:64]
    assert first.token_ids[64:] != second.token_ids[64:68]
    assert (first.max_tokens, second.max_tokens, second.due_s) == (4, 1, 1.5)


@pytest.mark.parametrize("text", ["", "0", "9:3", "4:x"])
def test_lengths_that_make_no_sense_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"lengths|invalid literal"):
        Lengths.parse(text)


@pytest.mark.parametrize("limit", [0.3, 1.0, 3.7, 7.9])
def test_the_rate_found_is_good_and_within_the_precision_of_the_limit(limit: float) -> None:
    async def serves_well(rate: float) -> bool:
        return rate <= limit

    rate = asyncio.run(bisect_rate(serves_well, highest=8.0, precision=1.1))
    assert rate <= limit <= rate * 1.1


def test_no_rate_is_found_where_none_is_good_and_the_highest_where_all_are() -> None:
    async def answer(rate: float, *, good: bool) -> bool:
        return good

    assert asyncio.run(bisect_rate(lambda rate: answer(rate, good=False), 8.0, 1.1)) == 0.0
    assert asyncio.run(bisect_rate(lambda rate: answer(rate, good=True), 8.0, 1.1)) == 8.0


def test_a_request_meets_the_targets_only_with_both_times() -> None:
    good = Sample("all", 4, 3, [0.5, 0.6, 0.7], 0.7)
    late = Sample("all", 4, 3, [2.0, 2.1, 2.2], 2.2)
    slow = Sample("all", 4, 3, [0.5, 1.0, 1.5], 1.5)
    assert Targets(ttft_s=1.0, tpot_s=0.2, share=0.9).attainment([good, late, slow, good]) == 0.5


def test_figures_are_of_all_samples() -> None:
    samples = [Sample("all", 4, 2, [0.1 * index, 0.1 * index + 0.05], 1.0) for index in range(1, 11)]
    figures = summarize(samples, elapsed_s=2.0)
    assert (figures["requests"], figures["output_tok_s"], figures["total_tok_s"]) == (10, 10.0, 30.0)
    assert figures["ttft_s"]["p50"] == pytest.approx(0.6)
    assert figures["itl_s"]["p99"] == pytest.approx(0.05)
    assert percentile([3.0, 1.0, 2.0], 50) == 2.0


def test_a_stopped_run_goes_on_from_its_results(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    measured: list[int] = []

    async def measure() -> dict[str, int]:
        measured.append(1)
        return {"value": len(measured)}

    assert asyncio.run(ResultsFile(path).get_or_measure({"seed": 1}, measure)) == {"value": 1}
    with path.open("a") as lines:
        lines.write('{"key": {"seed": 2}, "ro')  # what a kill leaves
    again = ResultsFile(path)
    assert asyncio.run(again.get_or_measure({"seed": 1}, measure)) == {"value": 1}
    assert not again.has({"seed": 2})
    assert asyncio.run(again.get_or_measure({"seed": 2}, measure)) == {"value": 2}
    assert ResultsFile(path).has({"seed": 2})
