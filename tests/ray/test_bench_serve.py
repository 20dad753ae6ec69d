"""`pdserve bench serve` against a real server."""

import json
import subprocess
import sys

import pytest

from tests.ray.server_process import ServerProcess

pytestmark = [pytest.mark.ray, pytest.mark.model, pytest.mark.timeout(300)]


def _bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "serving.cli", "bench", "serve", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240)


def test_the_report_has_every_figure(disaggregated: ServerProcess) -> None:
    sizes = ["--requests", "6", "--concurrency", "3", "--prompt-tokens", "20", "--output-tokens", "6"]
    done = _bench("--url", disaggregated.url, "--json", *sizes)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    for key in ("ttft_s", "itl_s", "e2e_s"):
        assert 0 < report[key]["p50"] <= report[key]["p90"] <= report[key]["p99"]
    assert report["requests"] == 6
    assert report["output_tok_s"] > 0
    assert set(report["ttft_share"]) == {"queue", "prefill", "transfer"}
    assert 0 < report["ttft_share"]["prefill"] <= 1


def test_a_server_that_is_not_there_is_one_line() -> None:
    done = _bench("--url", "http://127.0.0.1:9")
    assert done.returncode == 1
    assert "bench serve" in done.stderr
    assert "Traceback" not in done.stderr
