"""Collects what one iteration has to say, and sends it as one message per receiver."""

from collections import defaultdict
from typing import Protocol

from manager import Epoch, WorkerName
from scheduler.durations import PhaseDurations
from scheduler.messages import ReportBatch, TokenBatch, TokenEvent, WorkerHeartbeat, WorkerReport
from scheduler.output import DrawnToken
from scheduler.request import Request
from scheduler.spec import DoorName
from serving.workers.token_scores import TokenScore

_NO_SCORE = TokenScore()


class WorkerSinks(Protocol):
    """Where a worker's messages go. Calls return at once and never raise for a receiver that is gone."""

    def send_reports(self, batch: ReportBatch) -> None:
        """To the central scheduler."""
        ...

    def send_heartbeat(self, heartbeat: WorkerHeartbeat) -> None:
        """To the central scheduler; called from the agent's thread."""
        ...

    def send_tokens(self, batch: TokenBatch) -> None:
        """To the batch's door."""
        ...


class Outbox:
    """Messages of the iteration that is under way."""

    def __init__(self, worker: WorkerName, epoch: Epoch, sinks: WorkerSinks) -> None:
        """Send under this name and epoch."""
        self._worker = worker
        self._epoch = epoch
        self._sinks = sinks
        self._reports: list[WorkerReport] = []
        self._num_batches = 0
        self._tokens: dict[DoorName, list[TokenEvent]] = defaultdict(list)

    @property
    def num_batches(self) -> int:
        """Report batches sent so far: the number of the last one."""
        return self._num_batches

    @property
    def has_reports(self) -> bool:
        """Whether the central scheduler will be told anything by the next flush."""
        return bool(self._reports)

    def report(self, report: WorkerReport) -> None:
        """Tell the central scheduler."""
        self._reports.append(report)

    def token(
        self,
        request: Request,
        position: int,
        drawn: DrawnToken,
        durations: PhaseDurations | None,
        score: TokenScore = _NO_SCORE,
    ) -> None:
        """Tell the request's door."""
        event = TokenEvent(
            uid=request.spec.uid,
            attempt_id=request.attempt_id,
            position=position,
            token_id=drawn.token_id,
            finish_reason=drawn.finish_reason,
            durations=durations,
            logprobs=score.logprobs,
            prompt_logprobs=score.prompt_logprobs,
        )
        self._tokens[request.spec.door].append(event)

    def flush(self) -> None:
        """Send everything, tokens first: a stream should not wait for bookkeeping."""
        for door, events in self._tokens.items():
            self._sinks.send_tokens(TokenBatch(self._worker, self._epoch, door, tuple(events)))
        self._tokens.clear()
        if self._reports:
            self._num_batches += 1
            batch = ReportBatch(self._worker, self._epoch, tuple(self._reports), self._num_batches)
            self._reports = []
            self._sinks.send_reports(batch)
