"""`Supervisor`: looks after every process of a deployment, and has what died or stands still replaced (C5, C6, C13).

    seen                                  done
    a process is dead, or stopped         the central scheduler is told at once; a stopped one is killed
    central or door does not answer       it is killed
    a worker is fenced                    it is killed
    the central scheduler is lost         the one that stands by begins a term

Ray starts the next life of whatever was killed; a new door is told to listen where the last one did. A central
scheduler begins its term when it is first looked at: with one standing by that is at once, and the life that Ray starts
stands by next. Never blocks: `watch` is called several times a second.
"""

import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psutil
import ray

from configs import CentralConfig
from serving.actors.central_actor import CentralLook
from serving.actors.directory import CENTRAL_NAME
from serving.actors.door_actor import DoorLook
from serving.process_watch import ProcessLoss, ProcessWatch

_log = logging.getLogger("pdserve.supervisor")
_GIVE_UP_S = 60.0  # without a central scheduler or a door the server would answer 503 for ever (C13)
_STALL_S = 1.0
_STANDBY = "standby"


@dataclass(slots=True)
class _Asked:
    """An actor that is asked again and again whether it lives.

    Attributes:
        handle: Ray's; it has no static type.
        call: asks the question; returns a reference to the answer.
        limit_s: an answer that takes longer means that it stands still.
        reference: the question that is under way.
        since_s: when that was asked, or when the next one may be.
        answered_at_s: last answer.
    """

    name: str
    handle: Any
    call: Callable[[], Any]
    limit_s: float
    reference: Any = None
    since_s: float = float("-inf")
    answered_at_s: float = 0.0
    last_error: str = ""


class Supervisor:
    """Watches one central scheduler, the doors and the workers."""

    def __init__(
        self,
        centrals: Sequence[Any],
        doors: Mapping[str, Any],
        workers: Mapping[str, Any],
        config: CentralConfig,
        *,
        owns_processes: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Args.

        centrals: handles of the central scheduler and, where there is one, of the actor that stands by.
        doors: handles by name; started, and given to `open_door`.
        workers: handles by name.
        config: heartbeats and deadlines.
        owns_processes: whether the actors' processes are descendants of this one.
        clock: monotonic seconds.
        """
        now_s = clock()
        silence_s = config.missed_heartbeats * config.heartbeat_s
        central, *standbys = centrals
        self._answers_within_s, self._patience_s = 2 * silence_s, config.door_deadline_s
        self._central = _Asked(
            CENTRAL_NAME, central, self._look_at_central, self._answers_within_s, answered_at_s=now_s
        )
        self._standby: _Asked | None = None
        if standbys:
            self._standby = _Asked(
                _STANDBY, standbys[0], self._ask_standby, config.door_deadline_s, answered_at_s=now_s
            )
        self._doors = {
            name: _Asked(name, handle, handle.look.remote, config.door_deadline_s, answered_at_s=now_s)
            for name, handle in doors.items()
        }
        self._workers = dict(workers)
        self._heartbeat_s = config.heartbeat_s
        # A stop is seen, not guessed from silence, so it need not last as long: its streams stand still meanwhile.
        self._stopped_after_s = config.heartbeat_s / 2
        self._owns_processes = owns_processes
        self._clock = clock
        self._processes = ProcessWatch()
        self._door_lives: dict[str, DoorLook] = {}
        self._ports: dict[str, tuple[int, int]] = {}
        self._opening: dict[str, Any] = {}
        self._ended_pids: set[int] = set()
        self._watched_at_s = now_s

    def open_door(self, name: str, max_request_tokens: int, port: int) -> None:
        """Where every later life of this door listens, and the largest request that it takes."""
        self._ports[name] = (max_request_tokens, port)

    def watch(self) -> str | None:
        """Look once after everything; returns why the deployment cannot go on, or None."""
        now_s = self._clock()
        if now_s - self._watched_at_s > _STALL_S:
            self._excuse(now_s - self._watched_at_s)
        self._watched_at_s = now_s
        for loss in self._processes.look(now_s):
            self._on_loss(loss)
        look = self._ask(self._central, now_s)
        if look is not None:
            self._on_central(look)
        if self._standby is not None and (pid := self._ask(self._standby, now_s)) is not None:
            self._processes.follow(_STANDBY, pid, self._stopped_after_s)
        for door in self._doors.values():
            door_look = self._ask(door, now_s)
            if door_look is not None:
                self._on_door(door, door_look)
        # While one door answers, clients are served.
        heard_last = max(self._doors.values(), key=lambda door: door.answered_at_s)
        for asked in (self._central, heard_last):
            if now_s - asked.answered_at_s > _GIVE_UP_S:
                return f"{asked.name} has not answered for {_GIVE_UP_S:.0f} s: {asked.last_error}"
        return None

    # -- questions ---------------------------------------------------------------------------------

    def _ask(self, asked: _Asked, now_s: float) -> Any:
        """The answer, if one has just come."""
        if asked.reference is None:
            if now_s >= asked.since_s:
                asked.reference, asked.since_s = asked.call(), now_s
            return None
        ready, _ = ray.wait([asked.reference], timeout=0)
        if not ready:
            if now_s - asked.since_s > asked.limit_s:
                self._end(asked.name, self._processes.pid(asked.name), f"no answer for {asked.limit_s} s")
                asked.since_s = now_s
            return None
        asked.reference, asked.since_s = None, now_s + self._heartbeat_s / 2
        try:
            answer = ray.get(ready[0])
        except ray.exceptions.RayError as error:
            asked.last_error = f"{type(error).__name__}: {error}".splitlines()[0]
            if asked is self._central and self._processes.pid(CENTRAL_NAME) is None:
                self._promote()  # its process is none that can be watched from here
            return None
        asked.answered_at_s = now_s
        return answer

    def _look_at_central(self) -> Any:
        running = [(name, pid) for name in self._workers if (pid := self._processes.running_pid(name)) is not None]
        gone = [name for name in self._workers if self._processes.is_lost(name)]
        return self._central.handle.look.remote(running, gone)

    def _ask_standby(self) -> Any:
        assert self._standby is not None
        return self._standby.handle.stand_by.remote()

    def _promote(self) -> None:
        """The central scheduler is lost: the other actor begins a term, and the lost one stands by once it is back."""
        if self._standby is None:
            return
        _log.warning("the central scheduler that stood by takes over")
        lost, next_one = self._central, self._standby
        lost.handle, next_one.handle = next_one.handle, lost.handle
        lost.limit_s = self._patience_s  # of the life that takes over, until it has answered once
        for asked in (lost, next_one):
            asked.reference, asked.since_s = None, float("-inf")
        self._processes.rename(_STANDBY, CENTRAL_NAME)

    def _on_central(self, look: CentralLook) -> None:
        self._central.limit_s = self._answers_within_s
        self._processes.follow(CENTRAL_NAME, look.pid, self._stopped_after_s)
        for name, pid in look.workers:
            self._processes.follow(name, pid, self._stopped_after_s)
        for name, pid, reason in look.lost:
            self._end(name, pid, reason)

    def _on_door(self, door: _Asked, look: DoorLook) -> None:
        previous = self._door_lives.get(door.name)
        if previous is not None and previous.pid != look.pid:
            self._central.handle.door_gone.remote(previous.name)
        self._door_lives[door.name] = look
        # Ending a door ends its streams, so one that stands still is given all the time that it may have.
        self._processes.follow(door.name, look.pid, door.limit_s)
        opening = self._opening.pop(door.name, None)
        if look.port is None and door.name in self._ports:
            # Asked again with every look until it listens: its port may still be taken.
            self._opening[door.name] = opening or door.handle.start.remote(*self._ports[door.name])
            if opening is not None and ray.wait([opening], timeout=0)[0]:
                _log.error("%s does not listen: %s", door.name, _failure(opening))
                del self._opening[door.name]

    # -- losses ------------------------------------------------------------------------------------

    def _on_loss(self, loss: ProcessLoss) -> None:
        _log.warning("%s: %s", loss.name, loss.reason)
        if loss.name in self._workers:
            self._central.handle.worker_gone.remote(loss.name, loss.pid, loss.reason)
        elif loss.name in self._door_lives:
            self._central.handle.door_gone.remote(self._door_lives[loss.name].name)
        if loss.is_stopped:
            self._end(loss.name, loss.pid, loss.reason)
        if loss.name == CENTRAL_NAME:
            self._promote()

    def _end(self, name: str, pid: int | None, reason: str) -> None:
        """A life that was given up must not go on: end it, so that Ray starts the next one. Once a life."""
        if pid is None or pid in self._ended_pids:
            return
        self._ended_pids.add(pid)
        _log.warning("ending %s (pid %d): %s", name, pid, reason)
        process = self._own_process(pid)
        if process is not None:
            with contextlib.suppress(psutil.NoSuchProcess):  # it may be gone by now: that was the aim
                process.kill()  # a stopped process hears nothing else
        elif not self._owns_processes:
            ray.kill(self._handle(name), no_restart=False)

    def _handle(self, name: str) -> Any:
        if name == CENTRAL_NAME:
            return self._central.handle
        if self._standby is not None and name == _STANDBY:
            return self._standby.handle
        return self._doors[name].handle if name in self._doors else self._workers[name]

    def _own_process(self, pid: int) -> psutil.Process | None:
        return next((child for child in psutil.Process().children(recursive=True) if child.pid == pid), None)

    def _excuse(self, stalled_s: float) -> None:
        """This process stood still for so long: nobody was silent meanwhile."""
        for asked in (self._central, *self._doors.values(), *([self._standby] if self._standby else [])):
            asked.since_s += stalled_s
            asked.answered_at_s += stalled_s


def _failure(reference: Any) -> str:
    try:
        ray.get(reference)
    except ray.exceptions.RayError as error:
        return f"{type(error).__name__}: {error}".strip().splitlines()[-1]
    return ""
