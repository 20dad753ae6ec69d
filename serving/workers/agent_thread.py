"""The agent thread of a worker (C5): moves bytes, sweeps deadlines and sends heartbeats, step or no step."""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace

from kvtransfer.agent import TransferAgent
from scheduler.messages import WorkerHeartbeat, WorkerSnapshot, WorkerState
from serving.workers.outbox import WorkerSinks
from serving.workers.step_loop import WorkerLoop

_log = logging.getLogger("pdserve.agent")


class AgentThread:
    """Polls the agent whenever it asks to be, and beats at least every `heartbeat_s`."""

    def __init__(
        self,
        loop: WorkerLoop,
        agent: TransferAgent,
        sinks: WorkerSinks,
        heartbeat_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Idle until `start`."""
        self._loop = loop
        self.agent = agent
        self._sinks = sinks
        self._heartbeat_s = heartbeat_s
        self._clock = clock
        self._next_beat_s = float("-inf")
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="pdserve-agent", daemon=True)

    def start(self) -> None:
        """Begin; once."""
        self._thread.start()

    def stop(self) -> bool:
        """End the thread and wait for it; may be called twice. Returns whether it has ended."""
        self._stopping = True
        self.agent.kick()
        if self._thread.is_alive():
            self._thread.join(timeout=5)
        return not self._thread.is_alive()

    def run_once(self) -> float:
        """Poll, and beat when it is time; returns the seconds until it wants to be called again."""
        now_s = self._clock()
        delay_s = self.agent.poll(now_s)
        if now_s >= self._next_beat_s:
            self._beat(self._loop.snapshot())
            self._next_beat_s = now_s + self._heartbeat_s
        return min(delay_s, max(0.0, self._next_beat_s - self._clock()))

    def say_last_word(self, state: WorkerState) -> None:
        """Tell the central scheduler that this life is over, before it falls silent. From any thread."""
        self._stopping = True  # a later beat would take it back
        self._beat(replace(self._loop.snapshot(), state=state))

    def _run(self) -> None:
        while not self._stopping:
            self.agent.wait_for_work(self.run_once())

    def _beat(self, snapshot: WorkerSnapshot) -> None:
        self._sinks.send_heartbeat(
            WorkerHeartbeat(
                worker=snapshot.worker,
                epoch=snapshot.epoch,
                iteration=snapshot.iteration,
                longest_step_s=self._loop.longest_step_s,
                snapshot=snapshot,
                busy_s=self._loop.busy_s,
            )
        )
