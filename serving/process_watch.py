"""`ProcessWatch`: notices at once that a process of this host is dead, or has been stopped.

A heartbeat tells the same later, and from any host: this is the short way for processes that the
supervisor can see. Each loss is told once.
"""

from dataclasses import dataclass, field
from pathlib import Path

from serving.run_folder import ProcessMark

_STOPPED = "T"  # of /proc/<pid>/stat: by SIGSTOP; a process under a debugger is in "t"


@dataclass(frozen=True, slots=True)
class ProcessLoss:
    """A process that no longer works.

    Attributes:
        is_stopped: it exists, and must be ended before another takes its place.
    """

    name: str
    pid: int
    reason: str
    is_stopped: bool


@dataclass(slots=True)
class _Watched:
    mark: ProcessMark
    stopped_after_s: float
    stopped_since_s: float | None = None
    is_told: bool = False


@dataclass(slots=True)
class ProcessWatch:
    """Processes by name."""

    _watched: dict[str, _Watched] = field(default_factory=dict)

    def follow(self, name: str, pid: int, stopped_after_s: float) -> None:
        """Watch this process under this name from now on. The same again changes nothing.

        Args:
            name: of the actor.
            pid: of its present life.
            stopped_after_s: found stopped for so long, it is given up.
        """
        present = self._watched.get(name)
        if present is not None and present.mark.pid == pid:
            return
        mark = _mark(pid)
        if mark is not None:
            self._watched[name] = _Watched(mark, stopped_after_s)

    def pid(self, name: str) -> int | None:
        """The process that is watched under this name, unless it is lost."""
        watched = self._watched.get(name)
        return None if watched is None or watched.is_told else watched.mark.pid

    def running_pid(self, name: str) -> int | None:
        """The process that is watched under this name, if it was neither lost nor found stopped."""
        watched = self._watched.get(name)
        return None if watched is None or watched.stopped_since_s is not None else self.pid(name)

    def is_lost(self, name: str) -> bool:
        """Whether the process that was followed under this name was lost, and no other is followed since."""
        watched = self._watched.get(name)
        return watched is not None and watched.is_told

    def rename(self, name: str, other: str) -> None:
        """What is followed under `name`, if anything, is from now on followed under `other` alone."""
        self._watched.pop(other, None)
        if (watched := self._watched.pop(name, None)) is not None:
            self._watched[other] = watched

    def look(self, now_s: float) -> list[ProcessLoss]:
        """What was lost since the last look. Called many times a second."""
        losses = []
        for name, watched in self._watched.items():
            reason = "" if watched.is_told else _loss_reason(watched, now_s)
            if reason:
                watched.is_told = True
                is_stopped = watched.stopped_since_s is not None
                losses.append(ProcessLoss(name, watched.mark.pid, reason, is_stopped))
        return losses


def _loss_reason(watched: _Watched, now_s: float) -> str:
    state = _state(watched.mark)
    if state is None:
        watched.stopped_since_s = None
        return f"process {watched.mark.pid} is dead"
    if state != _STOPPED:
        watched.stopped_since_s = None
        return ""
    if watched.stopped_since_s is None:
        watched.stopped_since_s = now_s
    stopped_s = now_s - watched.stopped_since_s
    return (
        f"process {watched.mark.pid} was stopped for {stopped_s:.2f} s" if stopped_s >= watched.stopped_after_s else ""
    )


def _mark(pid: int) -> ProcessMark | None:
    """None for a process that does not run on this host."""
    try:
        fields = _stat(pid)
    except OSError:
        return None
    return ProcessMark(pid, int(fields[19]))


def _state(mark: ProcessMark) -> str | None:
    """The letter of its state; None when it is gone, a zombie, or another process has its pid."""
    try:
        fields = _stat(mark.pid)
    except OSError:
        return None
    return None if fields[0] in "ZX" or int(fields[19]) != mark.start_ticks else fields[0]


def _stat(pid: int) -> list[str]:
    """/proc/<pid>/stat behind the command's name: state first, start time at 19. Raises OSError."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except ProcessLookupError as error:  # it ended between open and read
        raise FileNotFoundError(*error.args) from error
