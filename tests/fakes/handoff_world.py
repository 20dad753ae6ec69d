"""`HandoffWorld`: a deployment of real parts whose every message, byte and second a test moves by hand.

Real: central scheduler, loops, iteration schedulers, managers, agents, sessions, lease and reservation tables.
Made up: arithmetic (`handoff_engine`), the wire (in this process), time, and the door (`handoff_door`). Messages
between two parties keep their order; what a killed process had not sent is lost, what it had sent arrives.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from kvtransfer.errors import PeerError
from kvtransfer.messages import ReaderId, SettleReply
from kvtransfer.transports.inprocess import InProcessRegistry
from manager import Epoch, LeaseId, WorkerName
from scheduler.central import AskDoor, AskWorker, CentralScheduler, NotifyDoor, SendToWorker
from scheduler.introductions import WorkerIntroduction
from scheduler.messages import ReportBatch, TokenBatch, WorkerHeartbeat, WorkerRole
from scheduler.reconcile import Divergence
from scheduler.spec import RequestSpec, RequestUid, Term
from serving.actors.report_order import ReportOrder
from serving.workers.worker_plan import WorkerIdentity
from tests.fakes.handoff_door import DOOR, DoorStream, HandoffDoor
from tests.fakes.handoff_worker import HandoffWorker, WorldShape

_BEAT_S = 0.3


@dataclass(slots=True)
class Question:
    """One settle on its way: asked, perhaps answered, perhaps lost."""

    owner: WorkerName
    lease_id: LeaseId
    epoch: Epoch
    reader: ReaderId
    answer: SettleReply | None = None
    is_answer_here: bool = False
    is_lost: bool = False

    def result(self) -> SettleReply | None:
        """What the reader's agent sees."""
        if self.is_lost:
            msg = f"{self.owner} does not answer"
            raise PeerError(msg)
        return self.answer if self.is_answer_here else None


class HandoffWorld:
    """Everything there is; nothing happens until a verb is called.

    Attributes:
        now_s: virtual seconds.
        workers: the present life of each worker.
        past_lives: those that were killed.
        questions: settles that have not reached their end.
        holds_answers: turns leave them where they are.
    """

    def __init__(self, shape: WorldShape | None = None) -> None:
        """Workers are registered and idle: context-0, ..., generation-0, ..., mixed-0, ..."""
        self.shape = WorldShape() if shape is None else shape
        self.now_s = 50.0
        self.registry = InProcessRegistry()
        self.central = CentralScheduler(self.shape.central, Term(1))
        self.questions: list[Question] = []
        self.holds_answers = False
        self._told_ok: set[ReaderId] = set()
        self.divergences: list[Divergence] = []
        self.workers: dict[WorkerName, HandoffWorker] = {}
        self.past_lives: list[HandoffWorker] = []
        self._from_door: deque[Callable[[], object]] = deque()
        self._to_door: deque[NotifyDoor] = deque()
        self.door = HandoffDoor(self._submit, self._cancel)
        self._num_lives = 0
        self._num_terms = 1
        self._order = ReportOrder()
        counts = {
            WorkerRole.CONTEXT: self.shape.context_workers,
            WorkerRole.GENERATION: self.shape.generation_workers,
            WorkerRole.MIXED: self.shape.mixed_workers,
        }
        for role, count in counts.items():
            for number in range(count):
                self._start(WorkerName(f"{role}-{number}"), role)

    def replace_central(self, *, loses_notices: bool = False) -> None:
        """The central scheduler is killed: what was under way to it is lost. A successor asks everybody (C6)."""
        self._num_terms += 1
        self._from_door.clear()
        if loses_notices:
            self._to_door.clear()
        # A term that finds itself known raises itself by one; the next one is begun far above it, by the clock.
        self.central = CentralScheduler(self.shape.central, Term(1000 * self._num_terms))
        self._order = ReportOrder()
        self.central.take_over(list(self.workers), [DOOR], self.now_s)
        self._take_commands()

    def __getitem__(self, name: str) -> HandoffWorker:
        """The present life of `context-0` and so on."""
        return self.workers[WorkerName(name)]

    # -- lives -----------------------------------------------------------------------------------------

    def _start(self, name: WorkerName, role: WorkerRole) -> None:
        self._num_lives += 1
        identity = WorkerIdentity(name, role, Epoch(self._num_lives), 0)
        worker = HandoffWorker(identity, self.shape, self.registry, self, lambda: self.now_s, self._told_ok)
        self.workers[name] = worker
        self.central.register_worker(worker.registration(), self.now_s)
        self._take_commands()

    def kill(self, name: str, *, num_sent: int | None = None) -> None:
        """Kill -9; of its last messages only the first `num_sent` had left it (None: all)."""
        worker = self[name]
        if worker.is_alive:
            worker.die()
            if num_sent is not None:
                del worker.outgoing[num_sent:]

    def supervise(self) -> None:
        """The supervisor ends lives that the central scheduler fenced, and starts what is dead again."""
        for name in self.central.lost_workers():
            self.kill(name)
        for name, worker in list(self.workers.items()):
            if not worker.is_alive:
                self._deliver_from(worker)
                self.central.worker_lost(name, "its process has ended", self.now_s)
                self._take_commands()
                self.past_lives.append(worker)
                self._start(name, worker.identity.role)

    # -- the door --------------------------------------------------------------------------------------

    def submit(self, prompt: Iterable[int], max_tokens: int = 4, *, priority: int = 0) -> DoorStream:
        """A client asks; the message is on its way."""
        return self.door.open(tuple(prompt), max_tokens, priority=priority)

    def abort(self, stream: DoorStream) -> None:
        """A client goes; the message is on its way."""
        self.door.abort(stream)

    def _submit(self, spec: RequestSpec) -> None:
        self._from_door.append(lambda: self._arrive(spec))

    def _arrive(self, spec: RequestSpec) -> None:
        self.door.on_notices(self.central.submit(DOOR, [spec], self.now_s).refused)

    def _cancel(self, uid: RequestUid) -> None:
        self._from_door.append(lambda: self.central.cancel(DOOR, [uid], self.now_s))

    # -- messages --------------------------------------------------------------------------------------

    def deliver_door(self, count: int = 1 << 30) -> None:
        """Bring messages of the door to the central scheduler, and notices to the door."""
        for _ in range(min(count, len(self._from_door))):
            self._from_door.popleft()()
            self._take_commands()
        for _ in range(min(count, len(self._to_door))):
            command = self._to_door.popleft()
            self.door.on_notices(command.notices, command.term)

    def deliver_from(self, name: str, count: int = 1 << 30) -> None:
        """Bring a worker's oldest messages to their receivers."""
        self._deliver_from(self[name], count)

    def _deliver_from(self, worker: HandoffWorker, count: int = 1 << 30) -> None:
        for _ in range(min(count, len(worker.outgoing))):
            message = worker.outgoing.pop(0)
            match message:
                case ReportBatch():
                    self._report(self._order.push(message))
                case WorkerIntroduction(registration=registration, reports_sent=reports_sent):
                    early = self._order.begin(registration.worker, registration.epoch, reports_sent)
                    self.central.introduce(message, self.now_s)
                    self._report(early)
                case WorkerHeartbeat():
                    self.divergences += self.central.heartbeat(message, self.now_s)
                case TokenBatch():
                    self.door.on_tokens(message)
            self._take_commands()

    def _report(self, due: Iterable[ReportBatch]) -> None:
        for batch in due:
            self.central.reports(batch, self.now_s)

    def _claim(self, term: Term) -> None:
        self.central.claim(DOOR, self.door.claim(term), self.now_s)

    def _take_commands(self) -> None:
        for command in self.central.take_commands():
            match command:
                case SendToWorker(worker=name, batch=batch, epoch=epoch):
                    worker = self.workers.get(name)
                    if worker is not None and worker.is_alive and worker.identity.epoch == epoch:
                        worker.post(batch)
                case AskWorker(worker=name, term=term):
                    asked = self.workers.get(name)
                    if asked is not None and asked.is_alive:
                        asked.introduce(term)
                case AskDoor(term=term):
                    self._from_door.append(partial(self._claim, term))
                case NotifyDoor():
                    self._to_door.append(command)

    def settle(self, owner: WorkerName, lease_id: LeaseId, epoch: Epoch, reader: ReaderId) -> Question:
        """The `PeerChannel` of every agent: the question is on its way."""
        self.questions.append(Question(owner, lease_id, epoch, reader))
        return self.questions[-1]

    def ask(self, question: Question) -> None:
        """The question arrives, perhaps not for the first time; a stopped owner answers when it wakes."""
        owner = self.workers[question.owner]
        if not owner.is_alive:
            question.is_lost = True
        elif not owner.is_paused:
            answer = owner.agent.settle(question.lease_id, question.epoch, question.reader, owner.now_s())
            if question.answer is None:
                question.answer = answer
            if answer is SettleReply.OK:
                self._told_ok.add(question.reader)

    def bring_answer(self, question: Question) -> None:
        """The answer arrives at the reader."""
        question.is_answer_here = question.answer is not None
        if question.is_answer_here or question.is_lost:
            self.questions.remove(question)

    # -- time and turns --------------------------------------------------------------------------------

    def advance(self, seconds: float) -> None:
        """Let time pass: who runs beats and sweeps, the central scheduler ticks."""
        until_s = self.now_s + seconds
        while self.now_s < until_s:
            self.now_s = min(until_s, self.now_s + _BEAT_S)
            for worker in self.workers.values():
                worker.poll()
                worker.beat()
                self._deliver_from(worker)
            self.central.door_heartbeat(DOOR, self.now_s)
            self.central.tick(self.now_s)
            self._take_commands()

    def turn(self) -> None:
        """Everything moves one step: all messages, all agents, all loops."""
        self.deliver_door()
        for worker in self.workers.values():
            worker.poll()
            worker.run_loop()
            self._deliver_from(worker)
        if not self.holds_answers:
            self.answer_all()

    def answer_all(self) -> None:
        """Every settle reaches its owner, and its answer the reader."""
        for question in list(self.questions):
            self.ask(question)
            self.bring_answer(question)

    def turns_until(self, condition: Callable[[], bool], limit: int = 200) -> None:
        """Turn, without time passing, until it holds. Raises AssertionError when it does not within `limit`."""
        for _ in range(limit):
            if condition():
                return
            self.turn()
        assert condition(), f"not within {limit} turns: {self.central.state(self.now_s)['central']}"

    def run(self, limit_s: float = 200.0) -> None:
        """Turn and let time pass until no stream is open. Raises AssertionError at the limit."""
        end_s = self.now_s + limit_s
        while self.door.open_streams:
            assert self.now_s < end_s, f"open: {self.door.open_streams}, {self.central.state(self.now_s)['central']}"
            for _ in range(4):
                self.turn()
            self.advance(0.1)
        self.check()

    # -- truth -----------------------------------------------------------------------------------------

    def check(self) -> None:
        """What holds at every moment. Raises AssertionError or CorruptedError."""
        violations = list(self.door.violations)
        for worker in (*self.workers.values(), *self.past_lives):
            violations += worker.engine.violations
        assert not violations, violations
        for worker in self.workers.values():
            worker.audit()
        self.central.audit()
        for stream in self.door.streams.values():
            assert len(stream.ends) <= 1, f"{stream.spec.uid} ended as {stream.ends}"

    def settle_down(self, limit_s: float = 60.0) -> None:
        """Let leases, cancels and quarantines end; then everything is at its baseline (I12)."""
        end_s = self.now_s + limit_s
        while self.leftovers() and self.now_s < end_s:
            self.turn()
            self.advance(0.5)
        self.check()
        assert not self.leftovers()

    def leftovers(self) -> list[str]:
        """What anybody still holds."""
        left = [what for worker in self.workers.values() if worker.is_alive for what in worker.leftovers()]
        state = self.central.state(self.now_s)
        numbers = {name: state["central"][name] for name in ("queued", "running", "waiting_context", "waiting_offer")}
        left += [f"central: {name} {count}" for name, count in numbers.items() if count]
        for worker_state in state["workers"]:
            if any(worker_state["ledger"].values()):
                left.append(f"ledger of {worker_state['name']}: {worker_state['ledger']}")
        return left

    def counter(self, name: str) -> int:
        """A cumulative counter of the central scheduler."""
        value = self.central.state(self.now_s)["counters"][name]
        assert isinstance(value, int)
        return value
