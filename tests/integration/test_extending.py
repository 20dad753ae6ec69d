"""EXTENDING.md does what it says: every block of it, in order, in a copy of this repository."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
# An edit that finds nothing to change leaves the reader with a switch that does nothing.
STRICT_EDITS = """
sed() {
    local -r file="${*: -1}"
    cp "$file" "$file.before"
    command sed "$@"
    if cmp --silent "$file" "$file.before"; then echo "changed nothing: sed $*" >&2; return 1; fi
    rm "$file.before"
}
"""


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


def _blocks() -> list[str]:
    page = (REPOSITORY / "EXTENDING.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```bash\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert len(blocks) == page.count("```bash")
    return blocks


def _run(blocks: list[str], folder: Path) -> str:
    """What the blocks print, run in order in a copy of the repository."""
    _clone(folder)
    command = ["env", "-u", "PYTHONPATH", "bash", "-c", "\n".join(["set -euo pipefail", STRICT_EDITS, *blocks])]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    return done.stdout


def test_every_edit_of_the_page_finds_its_place(tmp_path: Path) -> None:
    blocks = _blocks()
    assert sum(block.count("\nsed -i ") + block.startswith("sed -i ") for block in blocks) >= 5
    _run([re.sub(r"^\.venv/bin/python -m pytest .*$", "true", block, flags=re.MULTILINE) for block in blocks], tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_step_of_the_page_runs_as_written(tmp_path: Path) -> None:
    blocks = _blocks()
    printed = _run(blocks, tmp_path)
    assert printed.count(" passed") == sum(block.count("-m pytest") for block in blocks)
    # What a reader pastes is written as the rest of the repository is.
    for check in (["ruff", "check", "."], ["ruff", "format", "--check", "."]):
        linted = subprocess.run(
            [sys.executable, "-m", *check], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert linted.returncode == 0, linted.stdout
