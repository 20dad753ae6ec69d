"""The bench of a pass measures what it says: running decodes, and requests that stay blocked."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from serving import cli
from serving.bench.pass_stream import make_stream, replay
from serving.bench.scheduler import measure
from serving.bench.scheduler_stream import StreamOfOurs, compare_with_vllm


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


def test_our_side_of_the_shared_stream_ends_every_request_and_releases_all() -> None:
    stream = make_stream(3)
    driver = StreamOfOurs(3)
    seconds = replay(driver, len(stream), running=3)
    assert len(stream) == 12
    assert seconds.passes >= max(request.output_tokens for request in stream)
    assert 0 < seconds.us_per_pass < seconds.us_with_arrivals
    assert not driver.has_work


def test_a_python_without_vllm_is_reported_with_its_exit_status() -> None:
    with pytest.raises(subprocess.CalledProcessError):
        compare_with_vllm(Path(sys.executable), running=(2,), rounds=1)
