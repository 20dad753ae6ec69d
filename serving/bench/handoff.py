"""`pdserve bench handoff`: what a handoff costs beside its bytes, and a request at the central scheduler.

`handoff_us`: two real agents of one process over a transport that copies at once, a prompt of a few tiny pages: hold,
ticket, receive, read, settle, outcomes. `central_us`: the real central scheduler through whole lives of requests
(submission, context, offer, reservation, activation, end), `open` at a time; only its own calls are on the clock,
every report is a batch of its own, and workers answer at once. Of all rounds the best counts, since other load only
ever adds time.
"""

import argparse
import json
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import TypedDict, TypeVar

import numpy as np

from configs import CentralConfig, TransferConfig
from kvtransfer.agent import TransferAgent
from kvtransfer.messages import GroupLayout, PoolLayout, ReaderId, ReceiveOutcome, ReceiveResult, SettleReply
from kvtransfer.transports.inprocess import InProcessRegistry, InProcessTransport
from manager import (
    BlockOrdinal,
    Epoch,
    LayerGroupId,
    LeaseId,
    PageLease,
    PageLocation,
    RequestId,
    SlotId,
    TierLevel,
    WorkerName,
)
from scheduler.central import CentralScheduler, SendToWorker
from scheduler.messages import (
    Activated,
    ContextDone,
    Finished,
    Handoff,
    LeaseEnded,
    OfferGeneration,
    ReportBatch,
    Reserved,
    RunContext,
    WorkerCommand,
    WorkerRegistration,
    WorkerReport,
    WorkerRole,
)
from scheduler.spec import DoorName, FinishReason, RequestSpec, RequestUid, SamplingParams, StopParams, Term

OPEN = (16, 256)
_NUM_PAGES = 8
_PAGE_BYTES = 64
_PROMPT_TOKENS = 4 * _NUM_PAGES
_EPOCH = Epoch(1)
_OWNER, _READER = WorkerName("context-0"), WorkerName("generation-0")
_DOOR = DoorName("door-0")
_T = TypeVar("_T")


class HandoffReport(TypedDict):
    """The report; `central` has a row for each number of open requests."""

    handoff_us: float
    central: list[dict[str, float]]


def run(arguments: argparse.Namespace) -> int:
    """Measure and print."""
    report = measure(arguments.requests, arguments.rounds)
    if arguments.json:
        print(json.dumps(report))
        return 0
    print(f"handoff  {report['handoff_us']:8.1f} us, beside the bytes")
    for row in report["central"]:
        print(f"central  {row['central_us']:8.1f} us a request, {row['open']:.0f} open at a time")
    return 0


def measure(num_requests: int = 1000, rounds: int = 5) -> HandoffReport:
    """Measure both; `num_requests` in each of the rounds."""
    handoff_us = min(_Handoffs().run(num_requests) for _ in range(rounds))
    central = [
        {"open": num_open, "central_us": round(min(_Lives(num_open).run(num_requests) for _ in range(rounds)), 1)}
        for num_open in OPEN
    ]
    return HandoffReport(handoff_us=round(handoff_us, 1), central=central)


# -- two agents ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Answer:
    reply: SettleReply

    def result(self) -> SettleReply:
        return self.reply


class _Peers:
    """The owner's agent, asked directly."""

    owner: TransferAgent

    def settle(self, _: WorkerName, lease_id: LeaseId, epoch: Epoch, reader: ReaderId) -> _Answer:
        """At once."""
        return _Answer(self.owner.settle(lease_id, epoch, reader, 0.0))


class _Handoffs:
    """An owner that gives leases, and a reader."""

    def __init__(self) -> None:
        registry, peers = InProcessRegistry(), _Peers()
        self._owner = _agent(registry, peers, _OWNER)
        self._reader = _agent(registry, peers, _READER)
        peers.owner = self._owner
        self._pages = tuple(
            PageLocation(BlockOrdinal(block), LayerGroupId(0), SlotId(block), TierLevel.DEVICE)
            for block in range(_NUM_PAGES)
        )

    def run(self, num_handoffs: int) -> float:
        """Microseconds of one. Raises RuntimeError when a receive does not end well."""
        started_s = time.perf_counter()
        for number in range(num_handoffs):
            self._hand_off(number)
        return (time.perf_counter() - started_s) / num_handoffs * 1e6

    def _hand_off(self, number: int) -> None:
        attempt = RequestId(f"attempt-{number}")
        lease = PageLease(LeaseId(number + 1), _EPOCH, attempt, _PROMPT_TOKENS, self._pages)
        self._owner.hold(lease, 0.0)
        self._reader.start_receive(attempt, self._owner.make_ticket(lease), self._pages, 0.0)
        while not self._reader.has_outcomes:
            self._reader.poll(0.0)
        (outcome,) = self._reader.take_outcomes()
        self._owner.take_outcomes()
        if not isinstance(outcome, ReceiveOutcome) or outcome.result is not ReceiveResult.VERIFIED:
            msg = f"handoff {number} ended as {outcome}"
            raise RuntimeError(msg)


def _agent(registry: InProcessRegistry, peers: _Peers, worker: WorkerName) -> TransferAgent:
    transport = InProcessTransport(registry, worker)
    transport.register(np.zeros(_NUM_PAGES * _PAGE_BYTES, dtype=np.uint8))
    layout = PoolLayout(
        model_fingerprint="bench",
        num_kv_heads=1,
        head_dim=8,
        tokens_per_block=_PROMPT_TOKENS // _NUM_PAGES,
        dtype="uint8",
        groups=(GroupLayout((0,), None, 0, _PAGE_BYTES),),
        offsets=(0,),
        exactness_class="bench",
    )
    return TransferAgent(transport, peers, TransferConfig(), layout, worker, _EPOCH)


# -- the central scheduler -----------------------------------------------------------------------------


class _Lives:
    """A central scheduler with four workers of each role, and a clock around its calls."""

    def __init__(self, num_open: int) -> None:
        config = CentralConfig(
            max_running_per_context_worker=num_open,
            max_offers_per_generation_worker=num_open,
            max_queued_requests=num_open + 1,
        )
        self._central = CentralScheduler(config, Term(1))
        self._num_open = num_open
        self._spent_s = 0.0
        self._uids = count()
        self._memory = _agent(InProcessRegistry(), _Peers(), _OWNER)
        self._owner_of: dict[str, WorkerName] = {}
        for role in (WorkerRole.CONTEXT, WorkerRole.GENERATION):
            for number in range(4):
                registration = WorkerRegistration(WorkerName(f"{role}-{number}"), role, _EPOCH, number, 1 << 20)
                self._central.register_worker(registration, 0.0)

    def run(self, num_requests: int) -> float:
        """Microseconds of one request."""
        num_done = num_submitted = 0
        waiting: deque[tuple[WorkerName, WorkerReport]] = deque()
        while num_done < num_requests:
            while num_submitted < min(num_requests, num_done + self._num_open):
                self._submit()
                num_submitted += 1
            for command in self._timed(self._central.take_commands):
                if isinstance(command, SendToWorker):
                    waiting.extend(self._answers(command.worker, command.batch.commands))
            worker, report = waiting.popleft()
            self._timed(lambda: self._central.reports(ReportBatch(worker, _EPOCH, (report,)), 0.0))  # noqa: B023
            num_done += isinstance(report, Finished)
        self._timed(self._central.audit)
        return self._spent_s / num_requests * 1e6

    def _submit(self) -> None:
        spec = RequestSpec(
            uid=RequestUid(f"r{next(self._uids)}"),
            door=_DOOR,
            prompt_token_ids=tuple(range(_PROMPT_TOKENS)),
            sampling=SamplingParams(),
            stop=StopParams(max_tokens=8),
        )
        refused = self._timed(lambda: self._central.submit(_DOOR, [spec], 0.0)).refused
        if refused:
            raise RuntimeError(refused[0].message)

    def _answers(
        self, worker: WorkerName, commands: Iterable[WorkerCommand]
    ) -> Iterator[tuple[WorkerName, WorkerReport]]:
        """What a worker that has room says to its commands, and what follows."""
        for command in commands:
            match command:
                case RunContext(attempt_id=attempt_id):
                    self._owner_of[attempt_id] = worker
                    lease = PageLease(LeaseId(1), _EPOCH, RequestId(attempt_id), _PROMPT_TOKENS, ())
                    yield worker, ContextDone(attempt_id, Handoff(self._memory.make_ticket(lease), 1))
                case OfferGeneration(attempt_id=attempt_id):
                    yield worker, Reserved(attempt_id)
                    yield worker, Activated(attempt_id)
                    yield self._owner_of.pop(attempt_id), LeaseEnded(attempt_id, LeaseId(1), settled=True)
                    yield worker, Finished(attempt_id, FinishReason.LENGTH)
                case _:
                    msg = f"{worker} did not expect {command}"
                    raise RuntimeError(msg)

    def _timed(self, call: Callable[[], _T]) -> _T:
        started_s = time.perf_counter()
        try:
            return call()
        finally:
            self._spent_s += time.perf_counter() - started_s
