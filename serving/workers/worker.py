"""`Worker`: one worker's loop and agent, their threads, and what peers and the central scheduler call."""

import logging
import threading
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from kvtransfer import PeerError, TransferAgent
from manager import CorruptedError
from manager.kv_cache_manager import KVCacheManagerV2
from scheduler.messages import CommandBatch, WorkerRegistration, WorkerSnapshot, WorkerState
from scheduler.spec import Term
from serving.tracing.history import WorkerHistory
from serving.workers.agent_thread import AgentThread
from serving.workers.introduction import IntroductionSink
from serving.workers.step_loop import WorkerLoop
from serving.workers.transports import WorkerTransport
from serving.workers.worker_plan import WorkerIdentity

_log = logging.getLogger("pdserve.worker")
_IDLE_WAIT_S = 0.25


class Worker:
    """A built worker. `start` runs it on two threads; without `start`, `run_once` drives it by hand."""

    def __init__(
        self,
        identity: WorkerIdentity,
        loop: WorkerLoop,
        agent_thread: AgentThread,
        *,
        manager: KVCacheManagerV2,
        transport: WorkerTransport,
        on_close: Callable[[], None],
    ) -> None:
        """Use `assembly.build_worker`."""
        self.identity = identity
        self.manager = manager
        self._loop = loop
        self._agent_thread = agent_thread
        self._transport = transport
        self._on_close = on_close
        self._is_stopping = False
        self._on_fatal: Callable[[], None] = _nothing
        self._thread = threading.Thread(target=self._run, name="pdserve-loop", daemon=True)

    @property
    def agent(self) -> TransferAgent:
        """What peers talk to; its `settle` may be called from any thread."""
        return self._agent_thread.agent

    def registration(self) -> WorkerRegistration:
        """The first word to the central scheduler."""
        identity = self.identity
        return WorkerRegistration(
            worker=identity.name,
            role=identity.role,
            epoch=identity.epoch,
            pid=identity.pid,
            max_request_tokens=self.manager.max_request_tokens,
            tokens_per_block=self.manager.geometry.tokens_per_block,
        )

    def start(self, on_fatal: Callable[[], None]) -> None:
        """Run both threads. `on_fatal` is called when the loop dies of a bug: the worker must be fenced (M6)."""
        self._on_fatal = on_fatal
        self._thread.start()
        self._agent_thread.start()

    def post(self, batch: CommandBatch) -> None:
        """Commands of the central scheduler, from any thread."""
        self._loop.post(batch)

    def introduce(self, term: Term, sink: IntroductionSink) -> None:
        """A central scheduler of `term` asks what is held here, from any thread."""
        self._loop.introduce(term, self.registration(), sink)

    def answer_fetch(self, life: str, runs: list[tuple[int, int]]) -> npt.NDArray[np.uint8]:
        """Bytes of our memory for a peer that reads through the object store, on any thread. Raises PeerError."""
        if self._transport.answer_fetch is None:
            msg = f"{self.identity.name} has no object store transport"
            raise PeerError(msg)
        return self._transport.answer_fetch(life, runs)

    def history(self, seconds: float) -> WorkerHistory:
        """What was done in the last `seconds`, from any thread."""
        return self._loop.history(seconds)

    def snapshot(self) -> WorkerSnapshot:
        """The account of the last finished iteration."""
        return self._loop.snapshot()

    def run_once(self) -> bool:
        """One turn of the agent and one iteration, by hand."""
        self._agent_thread.run_once()
        return self._loop.run_once()

    def join(self, timeout_s: float) -> None:
        """Wait for the loop's thread to end."""
        self._thread.join(timeout_s)

    def stop(self, timeout_s: float = 30.0) -> bool:
        """End both threads and release the memory; may be called twice.

        Returns:
            Whether it did. A thread that is still in a step or a read after `timeout_s` keeps its memory, which
            then ends with the process: freed under it, it would be written after its reuse.
        """
        self._is_stopping = True
        self._loop.wake()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        if not self._agent_thread.stop() or self._thread.is_alive():
            _log.error(
                "%s did not stop in %.1f s; its memory is left to the end of the process", self.identity.name, timeout_s
            )
            return False
        self.agent.close()
        self._on_close()
        return True

    def _run(self) -> None:
        try:
            while not self._is_stopping:
                is_busy = self._loop.run_once()
                if not is_busy:
                    self._loop.wait(_IDLE_WAIT_S)
        except Exception as error:  # a bug: the state can no longer be trusted, so nothing may carry on with it
            _log.critical("%s: the loop died; last account %s", self.identity.name, self.snapshot(), exc_info=True)
            # Its streams continue elsewhere at once, instead of after the silence that follows.
            is_corrupted = isinstance(error, CorruptedError)
            self._agent_thread.say_last_word(WorkerState.CORRUPTED if is_corrupted else WorkerState.FAILED)
            self._on_fatal()


def _nothing() -> None:
    """Nobody to tell."""
