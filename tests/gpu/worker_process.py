"""A context worker in a process of its own, spoken to through a pipe: the device check's second process.

Neither Ray nor HTTP: the messages are the real ones, the pipe carries them.
"""

import multiprocessing
import os
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import NoReturn

from kvtransfer.messages import ReaderId, SettleReply
from manager import Epoch, LeaseId, WorkerName
from scheduler.messages import (
    CommandBatch,
    ReportBatch,
    TokenBatch,
    WorkerHeartbeat,
    WorkerRegistration,
    WorkerRole,
)
from serving.workers.assembly import build_worker
from serving.workers.worker_plan import WorkerIdentity, WorkerPlan

CONTEXT_NAME = WorkerName("context-0")


class _PipeSinks:
    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def send_reports(self, batch: ReportBatch) -> None:
        self._pipe.send(batch)

    def send_heartbeat(self, heartbeat: WorkerHeartbeat) -> None:
        self._pipe.send(heartbeat)

    def send_tokens(self, batch: TokenBatch) -> None:
        self._pipe.send(batch)


class _NoPeers:
    """A context worker asks nobody."""

    def settle(self, owner: WorkerName, lease_id: LeaseId, epoch: Epoch, reader: ReaderId) -> NoReturn:
        raise NotImplementedError(owner, lease_id, epoch, reader)


def _run(plan: WorkerPlan, pipe: Connection) -> None:
    identity = WorkerIdentity(CONTEXT_NAME, WorkerRole.CONTEXT, Epoch(time.time_ns()), os.getpid())
    worker = build_worker(identity, plan, _NoPeers(), _PipeSinks(pipe))
    pipe.send(worker.registration())
    while True:
        while pipe.poll(0):
            message = pipe.recv()
            match message:
                case CommandBatch():
                    worker.post(message)
                case ("settle", number, lease_id, epoch, reader):
                    pipe.send((number, worker.agent.settle(lease_id, epoch, reader, time.monotonic())))
                case None:
                    worker.manager.audit()
                    worker.stop()
                    return
        if not worker.run_once():
            pipe.poll(0.001)


class RemoteContextWorker:
    """The parent's side: commands out, everything that came back in `take`, and the peer channel of settles."""

    def __init__(self, plan: WorkerPlan) -> None:
        """Start the process and wait for its registration."""
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=_run, args=(plan, other), daemon=True)
        self._process.start()
        other.close()  # or this side would wait for ever for a process that died
        self._received: list[object] = []
        self._replies: dict[int, SettleReply] = {}
        self._num_asked = 0
        self.registration: WorkerRegistration = self._pipe.recv()

    def post(self, batch: CommandBatch) -> None:
        """Commands of the central scheduler."""
        self._pipe.send(batch)

    def take(self) -> Sequence[object]:
        """Reports, heartbeats and tokens since the last call."""
        while self._pipe.poll(0):
            message = self._pipe.recv()
            if isinstance(message, tuple):
                self._replies[message[0]] = message[1]
            else:
                self._received.append(message)
        taken, self._received = self._received, []
        return taken

    def settle(self, owner: WorkerName, lease_id: LeaseId, epoch: Epoch, reader: ReaderId) -> "_PipeReply":
        """See `PeerChannel.settle`."""
        assert owner == CONTEXT_NAME
        self._num_asked += 1
        self._pipe.send(("settle", self._num_asked, lease_id, epoch, reader))
        return _PipeReply(self._replies, self._num_asked)

    def stop(self) -> None:
        """Audit it, end it, and prove that it ended well."""
        self._pipe.send(None)
        self._process.join(60)
        assert self._process.exitcode == 0


class _PipeReply:
    def __init__(self, replies: dict[int, SettleReply], number: int) -> None:
        self._replies = replies
        self._number = number

    def result(self) -> SettleReply | None:
        return self._replies.get(self._number)
