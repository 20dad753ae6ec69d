"""`WorkerActor`: one worker process."""

import contextlib
import os
import time
from functools import partial

import numpy as np
import numpy.typing as npt
import ray

from kvtransfer.errors import PeerError
from kvtransfer.messages import ReaderId, SettleReply
from manager import Epoch, LeaseId, WorkerName
from scheduler.introductions import WorkerIntroduction
from scheduler.messages import CommandBatch, WorkerRegistration, WorkerRole
from scheduler.spec import Term
from serving.actors.directory import ActorPlace, Directory, prepare_process
from serving.actors.worker_links import RayPeers, RaySinks
from serving.tracing.history import WorkerHistory
from serving.workers.worker_plan import Surroundings, WorkerIdentity, WorkerPlan

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
        self._directory = directory = Directory(place.namespace)
        identity = WorkerIdentity(WorkerName(name), role, Epoch(time.time_ns()), os.getpid())
        spans_hosts = bool(plan.config.cluster.ray_address)  # a Ray of our own is this host alone
        host = ray.util.get_node_ip_address() if spans_hosts else "127.0.0.1"
        self._worker = build_worker(
            identity,
            plan,
            RayPeers(directory),
            RaySinks(directory),
            surroundings=Surroundings(host, place.namespace, spans_hosts),
        )
        self._registration = self._worker.registration()
        self._worker.start(on_fatal=_exit_after_last_word)
        for central in directory.centrals():
            central.register_worker.remote(self._registration)

    def registration(self) -> WorkerRegistration:
        """Answered once the worker runs."""
        return self._registration

    def post(self, epoch: Epoch, batch: CommandBatch) -> None:
        """Commands of the central scheduler to one life of this worker; those to an earlier one are dropped."""
        if epoch == self._registration.epoch:
            self._worker.post(batch)

    def follow_central(self, actor: str, term: Term) -> Epoch:
        """This one has the term. Returns which life of the worker has heard it."""
        self._directory.follow_central(actor, term)
        return self._registration.epoch

    def introduce(self, actor: str, term: Term) -> None:
        """A new central scheduler asks what is held here."""
        self.follow_central(actor, term)
        self._worker.introduce(term, partial(self._send_introduction, actor))

    def settle(self, lease_id: LeaseId, epoch: Epoch, reader: ReaderId) -> SettleReply:
        """A peer has read a lease."""
        return self._worker.agent.settle(lease_id, epoch, reader, time.monotonic())

    def answer_fetch(self, life: str, runs: list[tuple[int, int]]) -> npt.NDArray[np.uint8]:
        """A peer reads our pages through the object store."""
        return self._worker.answer_fetch(life, runs)

    def history(self, seconds: float) -> WorkerHistory:
        """For `pdserve trace export`."""
        return self._worker.history(seconds)

    def stop(self) -> None:
        """End the threads, release the memory."""
        self._worker.stop()

    def _send_introduction(self, actor: str, introduction: WorkerIntroduction) -> None:
        with contextlib.suppress(PeerError):
            self._directory.find(actor).introduce.remote(introduction)
