"""The rows can fail: with the rollback of any one resource disabled, the row that guards it does.

Other rows fail as well, most of them for most resources; one is named so that a run is short.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.divergence.mutation import JOURNALED, SCHEDULER_MUTATIONS

FOLDER = Path(__file__).parent
GUARDS = {
    "pages": "v02",
    "prefix_claim": "v05",
    "cursor": "v09",
    "cache": "v01",
    "adapter": "v20",
    "statistics": "v01",
    "eviction_order": "v10",
    "index_slot": "v01",
    "resume": "v03",
    "suspension": "v04",
    "draft_length": "v03",
    "budget": "v02",
    "victims": "v06",
    "waiting_line": "v13",
    "transfer_window": "v18",
}


def run_row(row: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    [file] = FOLDER.glob(f"test_{row}_*.py")
    command = [sys.executable, "-m", "pytest", str(file), "-x", "-p", "no:cacheprovider"]
    return subprocess.run(
        [*command, *arguments], cwd=FOLDER.parents[1], capture_output=True, text=True, timeout=240, check=False
    )


def test_every_mutation_has_a_guard() -> None:
    assert set(GUARDS) == {*JOURNALED, *SCHEDULER_MUTATIONS}


@pytest.mark.parametrize("resource", GUARDS)
def test_without_the_rollback_of_one_resource_its_row_fails(resource: str) -> None:
    plugin = ("-p", "tests.divergence.mutation", f"--disable-rollback-of={resource}")
    ended = run_row(GUARDS[resource], *plugin)
    assert ended.returncode == pytest.ExitCode.TESTS_FAILED, ended.stdout + ended.stderr


def test_with_every_rollback_the_same_rows_pass_in_the_same_way() -> None:
    ended = run_row("v01", "-p", "tests.divergence.mutation")
    assert ended.returncode == pytest.ExitCode.OK, ended.stdout + ended.stderr
