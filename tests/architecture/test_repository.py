"""The repository's own rules: sizes, diagrams, package list."""

import runpy
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_no_file_is_longer_than_its_wall() -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "size.py"))
    assert script["too_long"](ROOT) == []


def test_the_state_diagrams_in_architecture_are_those_of_the_tables() -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "diagrams.py"))
    text = (ROOT / "ARCHITECTURE.md").read_text()
    assert script["rendered"](text) == text


def test_every_package_folder_is_listed_for_installation() -> None:
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    roots = ("configs", "kvtransfer", "manager", "scheduler", "serving")
    found = {
        ".".join(path.parent.relative_to(ROOT).parts) for root in roots for path in (ROOT / root).rglob("__init__.py")
    }
    assert found == listed
