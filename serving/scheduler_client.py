"""`SchedulerClient`: a door's calls to the central scheduler, with their time limits and their clean-up.

A call that nobody waits for any more (the client left, the time is over) may still arrive. So every
submission that was given up is followed by a cancel once it has ended, for what nobody claims.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import TypeVar

from scheduler.messages import SubmitReply
from scheduler.spec import RequestSpec, RequestUid
from serving.endpoint import EndpointUnavailableError, SchedulerEndpoint

_log = logging.getLogger(__name__)
_RETRY_S = 0.1
_WARN_AGAIN_S = 1.0
_T = TypeVar("_T")


class SchedulerClient:
    """Calls of one door. Lives on one event loop."""

    def __init__(
        self,
        endpoint: SchedulerEndpoint,
        *,
        submit_timeout_s: float,
        state_timeout_s: float,
        restart_patience_s: float,
        is_wanted: Callable[[RequestUid], bool],
    ) -> None:
        """Args.

        endpoint: the central scheduler.
        submit_timeout_s: a submission must be answered within it.
        state_timeout_s: a question must be answered within it.
        restart_patience_s: see `submit_patiently`.
        is_wanted: whether this request's tokens are still wanted.
        """
        self._endpoint = endpoint
        self._submit_timeout_s = submit_timeout_s
        self._state_timeout_s = state_timeout_s
        self._restart_patience_s = restart_patience_s
        self._is_wanted = is_wanted
        self._warned_at_s = float("-inf")
        self._tasks: set[asyncio.Task[object]] = set()

    async def submit(self, specs: Sequence[RequestSpec]) -> SubmitReply:
        """Queue requests.

        Raises:
            EndpointUnavailableError: no answer in time, or no connection.
        """
        task = self.spawn(self._endpoint.submit(specs))
        uids = [spec.uid for spec in specs]
        try:
            done, _ = await asyncio.wait({task}, timeout=self._submit_timeout_s)
        except asyncio.CancelledError:
            task.add_done_callback(lambda _: self._cancel_unwanted(uids))
            raise
        if not done:
            task.add_done_callback(lambda _: self._cancel_unwanted(uids))
            raise EndpointUnavailableError(_no_answer(self._submit_timeout_s))
        return task.result()

    async def submit_patiently(self, specs: Sequence[RequestSpec]) -> SubmitReply:
        """Queue requests; where the central scheduler is being restarted, wait for its successor.

        Submitting again is safe: a uid that is queued already changes nothing.

        Raises:
            EndpointUnavailableError: nobody could be reached for `restart_patience_s`.
        """
        loop = asyncio.get_running_loop()
        give_up_at_s = loop.time() + self._restart_patience_s
        while True:
            try:
                return await self.submit(specs)
            except EndpointUnavailableError:
                if loop.time() >= give_up_at_s:
                    raise
            await asyncio.sleep(_RETRY_S)

    def cancel(self, uids: Sequence[RequestUid]) -> None:
        """End requests everywhere; returns at once."""
        self.spawn(self._within(self._endpoint.cancel(uids), self._submit_timeout_s))

    async def health(self) -> tuple[bool, str]:
        """Whether work can make progress, and the reason when it cannot. Never raises for a lost scheduler."""
        try:
            return await self._within(self._endpoint.health(), self._state_timeout_s)
        except EndpointUnavailableError as error:
            return False, str(error)

    async def cluster_state(self) -> Mapping[str, object]:
        """The cluster's account of itself. Raises EndpointUnavailableError."""
        return await self._within(self._endpoint.cluster_state(), self._state_timeout_s)

    def spawn(self, work: Coroutine[object, object, _T]) -> "asyncio.Task[_T]":
        """Run `work` beside everything else; its failure is logged if nobody asks for it."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_done)
        return task

    async def drain(self) -> None:
        """Wait until every call has ended; one that does not end in time is given up."""
        try:
            async with asyncio.timeout(self._submit_timeout_s):
                while self._tasks:
                    await asyncio.wait(set(self._tasks))
        except TimeoutError:
            _log.warning("%d calls to the scheduler were given up", len(self._tasks))
            for task in self._tasks:
                task.cancel()

    async def _within(self, call: Coroutine[object, object, _T], timeout_s: float) -> _T:
        try:
            async with asyncio.timeout(timeout_s):
                return await call
        except TimeoutError as error:
            raise EndpointUnavailableError(_no_answer(timeout_s)) from error

    def _cancel_unwanted(self, uids: Sequence[RequestUid]) -> None:
        if unwanted := [uid for uid in uids if not self._is_wanted(uid)]:
            self.cancel(unwanted)

    def _on_done(self, task: "asyncio.Task[object]") -> None:
        self._tasks.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        if isinstance(error, EndpointUnavailableError):
            now_s = task.get_loop().time()
            if now_s - self._warned_at_s >= _WARN_AGAIN_S:  # every request asks again and again
                self._warned_at_s = now_s
                _log.warning("the scheduler cannot be reached: %s", error)
        else:
            _log.error("a call to the scheduler failed", exc_info=error)


def _no_answer(timeout_s: float) -> str:
    return f"the scheduler did not answer in {timeout_s:g} s"
