"""What every row needs: a worker behind a call log, and a fault at each manager call in turn."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

from configs import SchedulerConfig
from manager import KVCacheManager
from scheduler.admission import TransferAdmission
from scheduler.messages import WorkerRole
from tests.fakes.call_log import CallLog, Injected, LoggedWindow
from tests.fakes.iteration_worker import IterationWorker, make_worker
from tests.fakes.small_cache import PRIMARY_ONLY, Members

WINDOW_BYTES = 10_000


@dataclass(frozen=True, slots=True)
class Scene:
    """A worker, the log of its manager's calls, and its transfer window."""

    worker: IterationWorker
    log: CallLog
    window: TransferAdmission

    @property
    def everything(self) -> object:
        """All that a pass or a completion could change: manager, requests, places, line, window."""
        scheduler = self.worker.scheduler
        here = [*scheduler.running, *scheduler.waiting]
        return (
            self.worker.manager.snapshot(),
            [(request.attempt_id, request.state, request.failed_steps, request.num_draft_tokens) for request in here],
            [(tuple(request.token_ids), len(request.history), request.num_reused_tokens) for request in here],
            self.window.taken_bytes,
        )


def make_scene(
    role: WorkerRole = WorkerRole.MIXED,
    *,
    num_pages: int = 8,
    max_sequences: int = 4,
    host_pages: int = 0,
    config: SchedulerConfig | None = None,
    members: Members = PRIMARY_ONLY,
) -> Scene:
    """A fresh worker; equal arguments make equal scenes, call for call."""
    logs: list[CallLog] = []
    window = TransferAdmission(WINDOW_BYTES)

    def wrap(manager: KVCacheManager) -> KVCacheManager:
        logs.append(CallLog(manager))
        return logs[0]

    worker = make_worker(
        role,
        num_pages=num_pages,
        max_sequences=max_sequences,
        host_pages=host_pages,
        config=config,
        members=members,
        window=LoggedWindow(window, lambda name: logs[0].note(name)),
        wrap=wrap,
    )
    return Scene(worker, logs[0], window)


def fault_at_every_call(build: Callable[[], Scene], act: Callable[[Scene], object]) -> list[str]:
    """Let each manager call that `act` makes raise, each in a fresh scene.

    After the fault everything is as before `act`; acting again and running to the end gives what a run
    without any fault gives, down to the last slot and the order of the cache.

    Returns:
        The names of the calls that were made to raise, in order.
    """
    plain = build()
    act(plain)
    plain.worker.settle()
    expected = (plain.worker.tokens, plain.everything)
    hit: list[str] = []
    for call in count():
        scene = build()
        before = scene.everything
        scene.log.aim(raise_in=call)
        try:
            act(scene)
        except Injected as fault:
            hit.append(str(fault))
        else:
            break
        assert scene.everything == before, f"call {call} ({hit[-1]}) left something behind"
        scene.worker.manager.audit()
        act(scene)
        scene.worker.settle()
        assert (scene.worker.tokens, scene.everything) == expected, f"call {call} ({hit[-1]}) changed the outcome"
        scene.worker.manager.audit()
    return hit


def pass_of(scene: Scene) -> object:
    """One pass and its step, as `act`; the step itself is not part of what may fail."""
    output = scene.worker.schedule()
    scene.log.aim()
    if output.has_step:
        scene.worker.complete(output)
    return output
