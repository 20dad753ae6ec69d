"""The bench of a pass measures what it says: running decodes, and requests that stay blocked."""

import json

import pytest

from serving import cli
from serving.bench.scheduler import measure


def test_waiting_requests_stay_blocked_and_cost_one_refused_attempt_a_pass() -> None:
    rows = measure(running=(4,), waiting=(0, 10, 200), rounds=1)
    assert [(row["running"], row["waiting"]) for row in rows] == [(4, 0), (4, 10), (4, 200)]
    assert [row["refused_per_pass"] for row in rows] == [0.0, 1.0, 1.0]
    assert all(row["pass_us"] > 0 for row in rows)


def test_the_command_prints_its_rows(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["bench", "scheduler", "--running", "2", "--waiting", "10", "--rounds", "1"]
    assert cli.main([*options, "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["running"], row["waiting"], row["of_ten_waiting"]) == (2, 10, 1.0)
    assert cli.main(options) == 0
    assert "of 10 waiting" in capsys.readouterr().out
