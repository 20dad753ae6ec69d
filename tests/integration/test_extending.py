"""EXTENDING.md does what it says: every block of it, in order, in a copy of this repository."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]


def _clone(folder: Path) -> None:
    """What a fresh clone has after `make setup`: the tracked files as they are now, and what was built."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=REPOSITORY, capture_output=True, check=True)
    built = [str(path.relative_to(REPOSITORY)) for path in (REPOSITORY / "serving/kernels").glob("_native*.so")]
    for name in [*filter(None, listed.stdout.decode().split("\0")), *built]:
        if (REPOSITORY / name).is_file():  # not one that was deleted just now
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPOSITORY / name, folder / name)
    (folder / ".venv").symlink_to(sys.prefix)
    identity = ["-c", "user.name=reader", "-c", "user.email=reader@localhost"]
    for command in (["init", "-q"], ["add", "-A"], [*identity, "commit", "-qm", "clone"]):
        subprocess.run(["git", *command], cwd=folder, check=True)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_step_of_the_page_runs_as_written(tmp_path: Path) -> None:
    page = (REPOSITORY / "EXTENDING.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```bash\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert len(blocks) == page.count("```bash")
    _clone(tmp_path)
    script = "\n".join(["set -euo pipefail", *blocks])
    done = subprocess.run(
        ["env", "-u", "PYTHONPATH", "bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert done.stdout.count(" passed") == sum(block.count("-m pytest") for block in blocks)
    # What a reader pastes is written as the rest of the repository is.
    for check in (["ruff", "check", "."], ["ruff", "format", "--check", "."]):
        linted = subprocess.run(
            [sys.executable, "-m", *check], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert linted.returncode == 0, linted.stdout
