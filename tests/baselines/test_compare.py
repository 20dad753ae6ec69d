"""The comparison over the real trace, where it is at hand."""

import json
from pathlib import Path

import pytest

from tests.baselines import compare

TRACE = Path(__file__).parents[2].parent / "shared" / "traces" / "mooncake_conversation.jsonl"

pytestmark = pytest.mark.skipif(not TRACE.is_file(), reason=f"no trace at {TRACE}")


def test_a_short_run_prints_both_sides_and_the_switches(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--trace", str(TRACE), "--scale", "16", "--output-scale", "16", "--speed", "10", "--json"]
    assert compare.main([*options, "--requests", "200", "--seeds", "1", "--share-requests", "0"]) == 0
    printed = json.loads(capsys.readouterr().out)
    ours, theirs = printed["transactional"], printed["try_and_see"]
    assert ours["stranded_page_iterations"] == ours["audit_violations"] == 0
    assert theirs["stranded_page_iterations"] > 0
    assert theirs["audit_violations"] > 0
    for side in (ours, theirs):
        assert side["makespan_s"] > 0
        assert {"suspensions", "passes"} <= side.keys()
        assert all(seed["failed"] == 0 for seed in side["seeds"])


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_five_arrival_seeds_strand_nothing_and_are_no_slower() -> None:
    result = compare.compare(compare.parser().parse_args(["--trace", str(TRACE)]))
    ours, theirs, ratio = result["transactional"], result["try_and_see"], result["makespan_ratio"]
    assert isinstance(ours, dict)
    assert isinstance(theirs, dict)
    assert isinstance(ratio, dict)
    assert ours["stranded_page_iterations"] == ours["audit_violations"] == 0
    assert all(seed["stranded_page_iterations"] > 0 for seed in theirs["seeds"])
    assert all(seed["suspensions"] > 0 for seed in ours["seeds"])
    assert ratio["mean"] <= 1.01
    assert ratio["worst"] <= 1.05
