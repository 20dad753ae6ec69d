"""lm-eval scores the served model as it scores transformers with the same weights.

lm-eval brings many packages, so it lives in an environment of its own (`make test-tools`).
"""

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from configs import load_deployment
from serving.engine.fetch import DEFAULT_MODEL, default_cache_dir, resolve_model
from tests.fakes.door import run_async
from tests.fakes.listening import listening
from tests.fakes.served_cluster import MODEL, serve
from tests.fakes.tiny_model import write_tiny_model
from tests.integration.api.evaluation_task import CONTINUE, REPEAT, write_tasks

REPOSITORY = Path(__file__).parents[3]
PAGES = ("README.md", "ARCHITECTURE.md", "OPERATIONS.md", "CONTRIBUTING.md", "EXTENDING.md")
NUM_DOCUMENTS = 16
MAX_LENGTH = 1024
SMALL: dict[str, dict[str, object]] = {
    "engine": {"dtype": "float32"},
    "cache": {"tiers": [{"tier": "device", "quota_bytes": 96 << 20}], "max_sequences": 16},
    "scheduler": {"max_batch_size": 16},
}


async def _scores(lm_eval: str, folder: Path, model: str, arguments: str) -> tuple[dict[str, Any], list[Any]]:
    """Metrics of each task, and what each document was answered."""
    output = folder / model
    process = await asyncio.create_subprocess_exec(
        "env", "-u", "PYTHONPATH", "HF_HUB_OFFLINE=1", "HF_DATASETS_OFFLINE=1", f"HF_HOME={folder}/hf",
        lm_eval, "run", "--model", model, "--model_args", arguments, "--tasks", f"{CONTINUE},{REPEAT}",
        "--device", "cpu", "--include_path", str(folder), "--output_path", str(output), "--log_samples",
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    told, _ = await process.communicate()
    assert process.returncode == 0, told.decode()[-4000:]
    (results,) = output.rglob("results_*.json")
    found = json.loads(results.read_text())["results"]
    generated = [
        json.loads(line)["filtered_resps"]
        for samples in sorted(output.rglob(f"samples_{REPEAT}_*.jsonl"))
        for line in samples.read_text().splitlines()
    ]
    return {task: {k: v for k, v in found[task].items() if "stderr" not in k} for task in found}, generated


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["tiny", pytest.param(DEFAULT_MODEL, marks=pytest.mark.model)])
@run_async
async def test_the_served_model_scores_as_transformers_does_with_the_same_weights(tmp_path: Path, name: str) -> None:
    lm_eval = shutil.which("lm-eval")
    if lm_eval is None:
        pytest.skip("lm-eval is not on PATH")
    write_tasks(tmp_path, [REPOSITORY / page for page in PAGES], NUM_DOCUMENTS)
    is_tiny = name == "tiny"
    model_folder = write_tiny_model(tmp_path / "model") if is_tiny else resolve_model(name, default_cache_dir())
    pools = tmp_path / "pools"
    pools.mkdir()
    config = load_deployment("local-cpu", SMALL)
    async with serve(config, model_folder, pools) as cluster, listening(cluster.app) as url:
        served, said = await _scores(
            lm_eval, tmp_path, "local-completions",
            f"model={MODEL},base_url={url}/v1/completions,tokenizer={model_folder},tokenizer_backend=huggingface,"
            f"num_concurrent=4,max_length={MAX_LENGTH}",
        )  # fmt: skip
    expected, expected_text = await _scores(
        lm_eval, tmp_path, "hf", f"pretrained={model_folder},dtype=float32,max_length={MAX_LENGTH}"
    )
    print(served)  # noqa: T201 -- the figures
    assert served == expected
    assert said == expected_text
    assert any(text != [""] for text in said)
    assert 0 < served[CONTINUE]["acc,none"] <= 1
