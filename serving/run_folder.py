"""The run folder of one server: which processes and files are its own, and the sweep after a crash.

A run folder `<root>/<run id>/` lies in shared memory. It holds the pool files of the workers and
`run.json`: the supervisor, every process that it started (pid and start time, since pids are reused)
and every folder outside that belongs to the run. `sweep` ends the processes and removes the files of
each run whose supervisor is gone, so that nothing of a killed server is left.
"""

import contextlib
import json
import os
import shutil
import uuid
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

RUN_ID_VARIABLE = "PDSERVE_RUN_ID"
"""Set in the environment of every process of a run: finds those that started after the last listing."""

_FIELD_OF_START = 19  # of /proc/<pid>/stat behind the command's name: clock ticks since boot


def run_root() -> Path:
    """Where this user's run folders live: in shared memory, which does not survive a boot."""
    return Path(f"/dev/shm/pdserve-{os.getuid()}")


def _start_ticks(pid: int) -> int:
    """When a process started, on a clock that nobody steps. Raises OSError when it is gone."""
    behind_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(behind_name[_FIELD_OF_START])


@dataclass(frozen=True, slots=True)
class ProcessMark:
    """A process, told from a later one with the same pid by its start."""

    pid: int
    start_ticks: int

    @classmethod
    def of(cls, process: psutil.Process) -> "ProcessMark":
        """Mark a live process. Raises OSError when it is gone."""
        return cls(process.pid, _start_ticks(process.pid))

    def find(self) -> psutil.Process | None:
        """The process, if it still runs."""
        try:
            process = psutil.Process(self.pid)
            alive = _start_ticks(self.pid) == self.start_ticks and process.status() != psutil.STATUS_ZOMBIE
        except (psutil.NoSuchProcess, OSError):
            return None
        return process if alive else None


class RunFolder:
    """The folder of one run; made by its supervisor, removed by `remove` or by a later `sweep`."""

    def __init__(self, path: Path, folders: tuple[Path, ...]) -> None:
        """Use `create`."""
        self.path = path
        self._folders = folders

    @classmethod
    def create(cls, outside: Iterable[Path] = (), *, root: Path | None = None, run_id: str = "") -> "RunFolder":
        """Make the folder and its first `run.json`, naming the calling process as supervisor.

        Args:
            outside: folders elsewhere that belong to the run and are removed with it.
            root: where run folders live; this user's when None.
            run_id: a fresh one when empty.
        """
        final = (root or run_root()) / (run_id or uuid.uuid4().hex[:12])
        # Another server's sweep must never see a run that names no supervisor yet.
        run = cls(final.with_name(f".{final.name}"), tuple(outside))
        run.path.mkdir(parents=True)
        run.record_processes()
        run.path.rename(final)
        run.path = final
        return run

    @property
    def run_id(self) -> str:
        """The folder's name."""
        return self.path.name

    def record_processes(self) -> None:
        """Write the supervisor and its present descendants to `run.json`. Called again and again."""
        supervisor = psutil.Process()
        marks = []
        for child in supervisor.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess, OSError):
                marks.append(ProcessMark.of(child))
        document = {
            "supervisor": asdict(ProcessMark.of(supervisor)),
            "processes": [asdict(mark) for mark in marks],
            "folders": [str(folder) for folder in self._folders],
        }
        fresh = self.path / "run.json.new"
        fresh.write_text(json.dumps(document))
        fresh.rename(self.path / "run.json")

    def remove(self) -> None:
        """End what is left of the run's processes and remove its files. May be called twice."""
        if self.path.exists():
            self.record_processes()
            _remove_run(self.path)


def sweep(*, root: Path | None = None) -> list[str]:
    """Clean up after every run under `root` (this user's) whose supervisor is gone; returns their ids."""
    root, swept = root or run_root(), []
    for path in sorted(root.iterdir()) if root.is_dir() else []:
        supervisor = _read(path).get("supervisor")
        if supervisor is None and path.name.startswith("."):
            continue  # being made just now
        if supervisor is None or ProcessMark(**supervisor).find() is None:
            _remove_run(path)
            swept.append(path.name)
    return swept


def _read(path: Path) -> dict:  # type: ignore[type-arg] # json
    try:
        document = json.loads((path / "run.json").read_text())
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}


def _remove_run(path: Path) -> None:
    document = _read(path)
    marks = [ProcessMark(**entry) for entry in document.get("processes", [])]
    processes = [process for mark in marks if (process := mark.find()) is not None]
    processes += _processes_of_run(path.name.lstrip("."))
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(processes, timeout=5)
    for folder in document.get("folders", []):
        shutil.rmtree(folder, ignore_errors=True)
    shutil.rmtree(path, ignore_errors=True)


def _processes_of_run(run_id: str) -> list[psutil.Process]:
    found = []
    own_pid = psutil.Process().pid
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid != own_pid and process.environ().get(RUN_ID_VARIABLE) == run_id:
                found.append(process)
    return found
