"""The repository's own rules: sizes, diagrams, package list."""

import runpy
import subprocess
import sys
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


def test_neither_the_supervisor_nor_the_door_nor_the_central_scheduler_imports_torch() -> None:
    # It costs each of them two seconds of start-up and 150 MB; only workers compute.
    program = "import sys, serving.cli, serving.cluster; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False, timeout=120).returncode == 0


def test_the_device_tests_need_neither_the_server_nor_the_cluster() -> None:
    absent = ("ray", "fastapi", "starlette", "uvicorn", "gguf", "llguidance", "prometheus_client", "pydantic", "httpx")
    program = (
        "import sys\n"
        f"sys.modules.update(dict.fromkeys({absent!r}))\n"  # an import of None raises
        "import tests.gpu.device_report, tests.gpu.test_device\n"
    )
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=120)
