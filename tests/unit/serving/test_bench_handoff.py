"""The bench of a handoff runs whole handoffs, and whole lives of requests."""

import json

import pytest

from serving import cli
from serving.bench.handoff import OPEN, measure


def test_both_costs_are_measured_for_each_number_of_open_requests() -> None:
    report = measure(num_requests=20, rounds=1)
    assert report["handoff_us"] > 0
    assert [row["open"] for row in report["central"]] == list(OPEN)
    assert all(row["central_us"] > 0 for row in report["central"])


def test_the_command_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "handoff", "--requests", "5", "--rounds", "1", "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)) == {"handoff_us", "central"}
