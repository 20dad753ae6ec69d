"""`WorkerActor`: one worker process."""

import os
import time

from kvtransfer.messages import SettleReply
from manager import Epoch, LeaseId, RequestId, WorkerName
from scheduler.messages import CommandBatch, WorkerRegistration, WorkerRole
from serving.actors.directory import CENTRAL_NAME, ActorPlace, Directory, prepare_process
from serving.actors.worker_links import RayPeers, RaySinks
from serving.workers.worker_plan import WorkerIdentity, WorkerPlan

_LAST_WORD_S = 0.2  # Ray sends in the background


def _exit_after_last_word() -> None:
    time.sleep(_LAST_WORD_S)
    os._exit(70)


class WorkerActor:
    """One worker process; Ray restarts it after a death, with a new epoch."""

    def __init__(self, place: ActorPlace, plan: WorkerPlan, name: str, role: WorkerRole) -> None:
        """Load the model and register."""
        from serving.workers.assembly import build_worker  # torch, in this process only

        prepare_process(place, name)
        directory = Directory(place.namespace)
        identity = WorkerIdentity(WorkerName(name), role, Epoch(time.time_ns()), os.getpid())
        self._worker = build_worker(identity, plan, RayPeers(directory), RaySinks(directory))
        self._registration = self._worker.registration()
        self._worker.start(on_fatal=_exit_after_last_word)
        directory.find(CENTRAL_NAME).register_worker.remote(self._registration)

    def registration(self) -> WorkerRegistration:
        """Answered once the worker runs."""
        return self._registration

    def post(self, batch: CommandBatch) -> None:
        """Commands of the central scheduler."""
        self._worker.post(batch)

    def settle(self, lease_id: LeaseId, epoch: Epoch, reader: RequestId) -> SettleReply:
        """A peer has read a lease."""
        return self._worker.agent.settle(lease_id, epoch, reader, time.monotonic())

    def stop(self) -> None:
        """End the threads, release the memory."""
        self._worker.stop()
