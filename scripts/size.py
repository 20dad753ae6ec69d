"""Fails when a Python file is too long to hold in one's head: 400 lines, 80 for a script."""

import subprocess
import sys
from pathlib import Path

WALL = 400
SCRIPT_WALL = 80


def too_long(root: Path) -> list[str]:
    """One line per file over its wall."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "*.py"], cwd=root, check=True, capture_output=True, text=True
    )
    complaints = []
    for name in listed.stdout.split():
        path = root / name
        if not path.is_file():
            continue
        lines = len(path.read_text().splitlines())
        wall = SCRIPT_WALL if name.startswith("scripts/") else WALL
        if lines > wall:
            complaints.append(f"{name}: {lines} lines, the wall is {wall}")
    return complaints


if __name__ == "__main__":
    found = too_long(Path(__file__).parents[1])
    print("\n".join(found) or "every file is within its size")
    sys.exit(bool(found))
