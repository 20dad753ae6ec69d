"""The run folder: what a killed server leaves is removed, what a live one owns is not."""

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from serving.run_folder import RUN_ID_VARIABLE, ProcessMark, RunFolder, sweep


def _sleeper(**environment: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], env={**os.environ, **environment})  # noqa: TID251 -- a child's environment


def _orphan(run: RunFolder) -> None:
    """Make the run look as after `kill -9` of its supervisor."""
    path = run.path / "run.json"
    document = json.loads(path.read_text())
    document["supervisor"]["start_ticks"] -= 1000
    path.write_text(json.dumps(document))


def test_a_sweep_ends_the_processes_and_files_of_a_dead_run(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    with _sleeper() as child:
        run = RunFolder.create([outside], root=tmp_path / "runs")
        (run.path / "worker.pool").write_bytes(b"pages")
        _orphan(run)
        assert sweep(root=tmp_path / "runs") == [run.run_id]
        assert not psutil.pid_exists(child.pid)
    assert not run.path.exists()
    assert not outside.exists()


def test_a_sweep_finds_a_process_that_started_after_the_last_listing(tmp_path: Path) -> None:
    run = RunFolder.create(root=tmp_path)
    with _sleeper(**{RUN_ID_VARIABLE: run.run_id}) as child:
        _orphan(run)
        sweep(root=tmp_path)
        assert not psutil.pid_exists(child.pid)


def test_a_sweep_leaves_a_run_whose_supervisor_lives(tmp_path: Path) -> None:
    run = RunFolder.create(root=tmp_path)
    assert sweep(root=tmp_path) == []
    assert run.path.exists()
    run.remove()
    run.remove()
    assert not run.path.exists()


def test_a_pid_that_was_reused_is_not_taken_for_the_old_process() -> None:
    mark = ProcessMark.of(psutil.Process())
    assert mark.find() is not None
    assert ProcessMark(mark.pid, mark.start_ticks - 5).find() is None


def test_a_sweep_removes_a_run_whose_file_is_damaged(tmp_path: Path) -> None:
    run = RunFolder.create(root=tmp_path)
    (run.path / "run.json").write_text("{")
    assert sweep(root=tmp_path) == [run.run_id]
    assert not run.path.exists()


def test_a_step_of_the_wall_clock_does_not_make_a_live_run_look_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunFolder.create(root=tmp_path)
    monkeypatch.setattr(psutil.Process, "create_time", lambda process: 0.0)  # what a step does to it
    assert sweep(root=tmp_path) == []
    assert run.path.exists()
