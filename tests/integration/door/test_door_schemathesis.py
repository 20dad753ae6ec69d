"""schemathesis against the served description: requests of every shape, over a real socket, with a real model."""

import asyncio
import re
import sys
from pathlib import Path

import pytest

from configs import ServerConfig
from tests.fakes.door import run_async
from tests.fakes.listening import listening
from tests.fakes.served_cluster import serve, small_config
from tests.fakes.tiny_model import write_tiny_model

CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
NUM_CASES = 2000
_EXAMPLES = 500
"""Of each operation; a path without parameters has fewer."""


@pytest.mark.slow
@pytest.mark.timeout(900)
@run_async
async def test_two_thousand_cases_find_no_fault_and_no_answer_that_is_not_described(tmp_path: Path) -> None:
    pytest.importorskip("schemathesis", reason="pip install schemathesis")
    folder = write_tiny_model(tmp_path / "model", max_position=128)
    pools = tmp_path / "pools"
    pools.mkdir()
    limits = ServerConfig(max_choices=4, max_prompts=4)
    async with serve(small_config(mixed=False), folder, pools, limits) as cluster, listening(cluster.app) as url:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "schemathesis.cli", "run", f"{url}/openapi.json",
            "--checks", CHECKS, "--max-examples", str(_EXAMPLES), "--phases", "examples,coverage,fuzzing",
            "--continue-on-failure", "--generation-database", "none", "--no-color",
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, cwd=tmp_path,
        )  # fmt: skip
        output, _ = await process.communicate()
    told = output.decode()
    print(told[-6000:])  # noqa: T201 -- the report, with its seed, where it is looked for
    assert process.returncode == 0, told[-6000:]
    counts = re.findall(r"(\d[\d,]*) generated", told)
    assert counts, told[-2000:]
    assert sum(int(count.replace(",", "")) for count in counts) >= NUM_CASES
