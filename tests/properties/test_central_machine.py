"""The central scheduler against naive workers and a naive door, under any order of events.

Messages wait in first-in-first-out channels until a rule delivers them; workers defer, fail, finish, die
and come back; the door cancels, dies and submits again. At every step: no attempt on two generation
workers, offers in order of arrival, counters that add up. At the end, once everything is let through:
every request has ended exactly once, and all counters are at their baseline (I2, I12, C11).
"""

from dataclasses import dataclass, replace
from typing import Any

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from configs import CentralConfig, DispatchPolicy
from manager import Epoch, WorkerName
from scheduler.central import AskDoor, AskWorker, CentralScheduler, NotifyDoor, SendToWorker
from scheduler.central_routing import HAND_EVERYTHING_OVER
from scheduler.messages import DoorNotice, OfferGeneration, ReportBatch, WorkerHeartbeat, WorkerRole
from scheduler.spec import AttemptId, RequestSpec, RequestUid, Term
from scheduler.states import RequestState
from scheduler.tracked_request import Phase
from tests.fakes.central_drain import LeaseClock, advance_part, receive
from tests.fakes.central_workers import ModelWorker
from tests.fakes.central_world import DOOR, make_spec

_ROLES = {"c": WorkerRole.CONTEXT, "g": WorkerRole.GENERATION, "m": WorkerRole.MIXED}
_MAX_ROUNDS = 120
_SETTINGS = settings(max_examples=60, stateful_step_count=50, deadline=None, derandomize=True, database=None)


@dataclass
class DoorEntry:
    """One request at the door: how it ended, if it has."""

    spec: RequestSpec
    end: str = ""
    must_resubmit: bool = False


class CentralMachine(RuleBasedStateMachine):
    """Rules over one deployment; subclasses say which."""

    names: tuple[str, ...] = ("c0", "c1", "g0", "g1")
    dispatch = DispatchPolicy.CONTEXT_FIRST
    router = HAND_EVERYTHING_OVER
    is_lossy = False
    is_succeeded = False

    def __init__(self) -> None:
        super().__init__()
        config = CentralConfig(
            dispatch=self.dispatch, max_running_per_context_worker=2, max_offers_per_generation_worker=3
        )
        self.config = config
        self.central = CentralScheduler(config, Term(1), self.router)
        self.num_terms = 1
        self.now_s = 0.0
        self.workers: dict[str, ModelWorker] = {}
        self.ghosts: list[ReportBatch | WorkerHeartbeat] = []
        self.entries: dict[RequestUid, DoorEntry] = {}
        self.leases = LeaseClock(duration_s=10.0)
        self.num_notices = 0
        self.num_lives = 0
        for name in self.names:
            self._start(name)

    # -- the door ----------------------------------------------------------------------------------

    @rule(num_prompt=st.integers(1, 40), max_tokens=st.integers(1, 5), priority=st.sampled_from([0, 0, 0, 1]))
    def submit(self, num_prompt: int, max_tokens: int, priority: int) -> None:
        spec = make_spec(f"r{len(self.entries)}", num_prompt, max_tokens, priority=priority)
        self.entries[spec.uid] = DoorEntry(spec)
        self._submit(spec)

    @rule()
    def resubmit(self) -> None:
        for entry in self.entries.values():
            if entry.must_resubmit:
                entry.must_resubmit = False
                num_accepted = min(len(entry.spec.accepted_token_ids) + 1, entry.spec.stop.max_tokens - 1)
                entry.spec = replace(entry.spec, accepted_token_ids=tuple(range(num_accepted)))
                self._submit(entry.spec)

    @rule()
    def repeat_everything(self) -> None:
        for uid in self.entries.keys() & self._books.requests.keys():
            self._submit(self.entries[uid].spec)

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        uids = [uid for uid, entry in self.entries.items() if not entry.end]
        if uids:
            uid = data.draw(st.sampled_from(uids))
            self._end(uid, "cancelled")
            self.central.cancel(DOOR, [uid, uid], self.now_s)
            self._take()

    @rule()
    def lose_door(self) -> None:
        for uid in self.entries:
            self._end(uid, "cancelled")
        self.central.door_lost(DOOR, self.now_s)
        self._take()

    # -- workers -----------------------------------------------------------------------------------

    @rule(data=st.data())
    def work(self, data: st.DataObject) -> None:
        worker = self._draw_worker(data)
        if worker is None:
            return
        worker.read_commands()
        for _ in range(data.draw(st.integers(0, 3))):
            self._act(worker, data)
        worker.flush()

    @rule(data=st.data(), count=st.integers(1, 4))
    def deliver(self, data: st.DataObject, count: int) -> None:
        worker = self._draw_worker(data)
        if worker is not None:
            for _ in range(min(count, len(worker.outgoing))):
                self._hear(worker.outgoing.pop(0))

    @rule(data=st.data())
    def beat(self, data: st.DataObject) -> None:
        worker = self._draw_worker(data)
        if worker is not None:
            worker.beat()

    @rule(data=st.data())
    def kill(self, data: st.DataObject) -> None:
        worker = self._draw_worker(data)
        if worker is not None:
            del self.workers[worker.name]
            self.ghosts += worker.outgoing
            self.central.worker_lost(worker.name, "killed", self.now_s)
            self._take()

    @rule()
    def restart(self) -> None:
        fenced = self.central.lost_workers()
        for name in self.names:
            if name not in self.workers or WorkerName(name) in fenced:
                self._start(name)

    @rule()
    def hear_ghosts(self) -> None:
        ghosts, self.ghosts = self.ghosts, []
        for message in ghosts:
            self._hear(message)

    @rule(seconds=st.sampled_from([0.1, 0.5, 1.0]))
    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds
        self.central.tick(self.now_s)
        self._take()

    @precondition(lambda self: self.is_lossy)
    @rule(data=st.data())
    def drop_a_message(self, data: st.DataObject) -> None:
        worker = self._draw_worker(data)
        if worker is not None:
            channel: list[Any] = worker.outgoing if data.draw(st.booleans()) else worker.inbox
            if channel:
                channel.pop(0)

    @precondition(lambda self: self.is_succeeded)
    @rule(loses_reports=st.booleans())
    def succeed_the_central_scheduler(self, loses_reports: bool) -> None:
        self.num_terms += 1
        self.num_notices = 0
        self.central = CentralScheduler(self.config, Term(self.num_terms), self.router)
        if loses_reports:
            for worker in self.workers.values():
                worker.outgoing.clear()
        self.central.take_over([WorkerName(name) for name in self.names], [DOOR], self.now_s)
        self._take()

    # -- what must hold after every rule -------------------------------------------------------------

    @invariant()
    def no_attempt_is_on_two_generation_workers(self) -> None:
        held: list[AttemptId] = []
        for worker in self.workers.values():
            if worker.role is not WorkerRole.CONTEXT:
                held += worker.parts
        assert len(held) == len(set(held))

    @invariant()
    def counters_add_up_and_load_is_what_is_held(self) -> None:
        self.central.audit()
        counters, books = self._books.counters, self._books
        ended = sum(counters[name] for name in ("completed", "failed", "handed_back", "cancelled"))
        assert counters["submitted"] + counters["resubmitted"] == ended + len(books.requests)
        assert counters["failed"] + counters["handed_back"] == self.num_notices
        if self.is_succeeded:
            return  # what an earlier term gave, and this one cancels, is counted on top
        limits = {WorkerRole.CONTEXT: 2, WorkerRole.GENERATION: 3, WorkerRole.MIXED: 3}
        for record in books.ledger:
            assert 0 <= record.num_attempts <= limits[record.registration.role]
            assert record.num_tokens >= 0

    @invariant()
    def a_request_waits_in_exactly_the_queue_of_its_phase(self) -> None:
        for request in self._books.requests.values():
            assert (request.key in self._books.contexts) == (request.phase is Phase.WAITING_CONTEXT)
            assert (request.key in self._books.offers) == (request.phase is Phase.WAITING_OFFER)
            assert (request.attempt_id in self._books.attempts) == (request.state is RequestState.RUNNING)

    def teardown(self) -> None:
        for _ in range(_MAX_ROUNDS):
            self._round()
            if not self._books.requests and not self._is_anything_held():
                break
        assert not self._books.requests
        assert not self._books.attempts
        assert not any(worker.parts for worker in self.workers.values())
        assert all(
            not record.holdings and record.num_attempts == record.num_tokens == 0 for record in self._books.ledger
        )
        assert all(entry.end and not entry.must_resubmit for entry in self.entries.values())

    # -- parts -------------------------------------------------------------------------------------

    def _is_anything_held(self) -> bool:
        is_held = any(worker.parts for worker in self.workers.values())
        return is_held or any(record.holdings for record in self._books.ledger)

    @property
    def _books(self) -> Any:
        return self.central._books

    def _start(self, name: str) -> None:
        self.num_lives += 1
        worker = ModelWorker(WorkerName(name), _ROLES[name[0]], Epoch(self.num_lives))
        self.workers[name] = worker
        assert self.central.register_worker(worker.registration(), self.now_s)
        self._take()

    def _draw_worker(self, data: st.DataObject) -> ModelWorker | None:
        return self.workers[data.draw(st.sampled_from(sorted(self.workers)))] if self.workers else None

    def _act(self, worker: ModelWorker, data: st.DataObject) -> None:
        if not worker.parts:
            return
        attempt_id = data.draw(st.sampled_from(sorted(worker.parts)))
        part = worker.parts[attempt_id]
        is_good = data.draw(st.sampled_from([True, True, True, False]))
        if part == "leased":
            if not is_good:
                worker.end_lease(attempt_id, settled=False)
        elif part == "offered":
            # As real workers do: a deferral defers everything younger (order of admission).
            for waiting in [held for held, kind in worker.parts.items() if kind == "offered"]:
                worker.reserve(waiting) if is_good else worker.defer(waiting)
        elif is_good and part == "reserved":
            receive(worker, attempt_id, self.workers)
        elif is_good and part == "context" and data.draw(st.booleans()):
            worker.finish_by_first_token(attempt_id)
            self._end(worker.specs[attempt_id].uid, "finished")
        elif is_good:
            self._advance(worker, attempt_id)
        else:
            worker.fail(attempt_id, retriable=data.draw(st.booleans()))

    def _advance(self, worker: ModelWorker, attempt_id: AttemptId) -> None:
        if worker.parts[attempt_id] in {"active", "local"}:
            self._end(worker.specs[attempt_id].uid, "finished")
        advance_part(worker, attempt_id, self.workers)

    def _end(self, uid: RequestUid, how: str) -> None:
        """The door takes the first end and drops repeats (C9)."""
        entry = self.entries[uid]
        if not entry.end:
            entry.end = how
            entry.must_resubmit = False

    def _submit(self, spec: RequestSpec) -> None:
        for notice in self.central.submit(DOOR, [spec], self.now_s).refused:
            self._end(notice.uid, f"refused {notice.kind}")
        self._take()

    def _hear(self, message: ReportBatch | WorkerHeartbeat) -> None:
        if isinstance(message, ReportBatch):
            self.central.reports(message, self.now_s)
        else:
            divergences = self.central.heartbeat(message, self.now_s)
            assert self.is_lossy or self.is_succeeded or not divergences, "a false alarm"
        self._take()

    def _take(self) -> None:
        for command in self.central.take_commands():
            match command:
                case SendToWorker(worker=name, batch=batch, epoch=epoch):
                    self._check_offers([c for c in batch.commands if isinstance(c, OfferGeneration)])
                    worker = self.workers.get(name)
                    if worker is not None and worker.epoch == epoch:
                        worker.inbox.append(batch)
                case NotifyDoor(notices=notices):
                    for notice in notices:
                        self._on_notice(notice)
                case AskWorker(worker=name, term=term):
                    if name in self.workers:
                        self.workers[name].flush()
                        self.workers[name].outgoing.clear()  # all of it is in the introduction
                        self.central.introduce(self.workers[name].introduce(term), self.now_s)
                        self._take()
                case AskDoor():
                    claims = [entry.spec for entry in self.entries.values() if not entry.end]
                    self.central.claim(DOOR, claims, self.now_s)
                    for entry in self.entries.values():
                        entry.must_resubmit = False
                    self._take()

    def _check_offers(self, offers: list[OfferGeneration]) -> None:
        keys = [self._books.attempts[offer.attempt_id].key for offer in offers]
        assert keys == sorted(keys)
        waiting = [request.key for request in self._books.offers]
        assert not keys or not waiting or keys[-1] < min(waiting)

    def _on_notice(self, notice: DoorNotice) -> None:
        self.num_notices += 1
        assert notice.uid not in self._books.requests
        if notice.retriable and not self.entries[notice.uid].end:
            self.entries[notice.uid].must_resubmit = True
        elif not notice.retriable:
            self._end(notice.uid, f"failed {notice.kind}")

    def _round(self) -> None:
        """Let everything through once, and half a second pass."""
        self.restart()
        self.resubmit()
        self.hear_ghosts()
        for worker in list(self.workers.values()):
            worker.read_commands()
            for attempt_id in list(worker.parts):
                self._advance(worker, attempt_id)
        for worker in list(self.workers.values()):
            self.leases.expire(worker, self.now_s)
            worker.flush()
            worker.beat()
            outgoing, worker.outgoing = worker.outgoing, []
            for message in outgoing:
                self._hear(message)
        self.now_s += 0.5
        self.central.tick(self.now_s)
        self._take()


class GenerationFirstMachine(CentralMachine):
    """Reservations before contexts."""

    dispatch = DispatchPolicy.GENERATION_FIRST


class MixedMachine(CentralMachine):
    """Workers that compute both phases."""

    names = ("m0", "m1")


class SucceededMachine(CentralMachine):
    """The central scheduler dies at any moment; a successor asks everyone (C6)."""

    is_succeeded = True


class SucceededGenerationFirstMachine(SucceededMachine):
    """The same, with reservations before contexts."""

    dispatch = DispatchPolicy.GENERATION_FIRST


class LossyMachine(CentralMachine):
    """Channels that lose messages: the reconcile must bring everything back to baseline."""

    is_lossy = True


TestContextFirst = CentralMachine.TestCase
TestContextFirst.settings = _SETTINGS
TestGenerationFirst = GenerationFirstMachine.TestCase
TestGenerationFirst.settings = _SETTINGS
TestMixed = MixedMachine.TestCase
TestMixed.settings = _SETTINGS
TestSucceeded = SucceededMachine.TestCase
TestSucceeded.settings = _SETTINGS
TestSucceededGenerationFirst = SucceededGenerationFirstMachine.TestCase
TestSucceededGenerationFirst.settings = _SETTINGS
TestLossy = LossyMachine.TestCase
TestLossy.settings = _SETTINGS
