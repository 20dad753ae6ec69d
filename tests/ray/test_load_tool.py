"""A public load generator sweeps a served model: every request is answered.

guidellm brings many packages, so it lives in an environment of its own (`make test-tools`).
"""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from serving.engine.fetch import default_cache_dir, resolve_model
from tests.ray.server_process import ServerProcess

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.model, pytest.mark.timeout(600)]

_NUM_STRATEGIES = 4
"""One request at a time, as many as the server takes, and rates between them."""
_NUM_REQUESTS = 8


def test_a_sweep_of_guidellm_completes_without_errors(disaggregated: ServerProcess, tmp_path: Path) -> None:
    guidellm = shutil.which("guidellm")
    if guidellm is None:
        pytest.skip("guidellm is not on PATH")
    server, report = disaggregated, tmp_path / "report.json"
    subprocess.run(
        [
            "env", "-u", "PYTHONPATH", "HF_HUB_OFFLINE=1",
            guidellm, "run", "--disable-console-interactive",
            "--backend", f"kind=openai_http,target={server.url}",
            "--profile", f"kind=sweep,sweep_size={_NUM_STRATEGIES}",
            "--constraint", f"kind=max_requests,count={_NUM_REQUESTS}",
            "--tokenizer", f"kind=hf_auto,model={resolve_model(server.model, default_cache_dir())}",
            "--data", "kind=synthetic_text,prompt_tokens=100,output_tokens=32",
            "--output", f"kind=json,path={report}",
        ],
        cwd=tmp_path, check=True,
    )  # fmt: skip
    benchmarks = json.loads(report.read_text())["benchmarks"]
    assert len(benchmarks) == _NUM_STRATEGIES
    for benchmark in benchmarks:
        totals = benchmark["metrics"]["request_totals"]
        assert totals["errored"] == 0, benchmark["requests"]["errored"]
        assert totals["successful"] == _NUM_REQUESTS
        told = benchmark["metrics"]["output_token_count"]["successful"]
        assert told["min"] == told["max"] == 32
    server.wait_for_baseline()
