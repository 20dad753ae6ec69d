"""The real central scheduler among naive workers and one door, with a clock that tests turn by hand."""

from collections.abc import Callable, Sequence

from configs import CentralConfig, RouterConfig
from manager import Epoch, WorkerName
from scheduler.central import AskDoor, AskWorker, CentralScheduler, NotifyDoor, SendToWorker
from scheduler.central_routing import HAND_EVERYTHING_OVER
from scheduler.messages import DoorNotice, ReportBatch, RoomReported, SubmitReply, WorkerCommand, WorkerRole
from scheduler.reconcile import Divergence
from scheduler.spec import AttemptId, DoorName, RequestSpec, RequestUid, SamplingParams, StopParams, Term
from tests.fakes.central_workers import ModelWorker

DOOR = DoorName("door-0")
_ROLES = {"c": WorkerRole.CONTEXT, "g": WorkerRole.GENERATION, "m": WorkerRole.MIXED}


def make_spec(uid: str, num_prompt: int = 10, max_tokens: int = 5, accepted: int = 0, priority: int = 0) -> RequestSpec:
    """A request of known size."""
    return RequestSpec(
        uid=RequestUid(uid),
        door=DOOR,
        prompt_token_ids=tuple(range(num_prompt)),
        sampling=SamplingParams(),
        stop=StopParams(max_tokens=max_tokens),
        accepted_token_ids=tuple(range(accepted)),
        priority=priority,
        is_continuation=accepted > 0,
    )


class CentralWorld:
    """Delivers every message at once, unless a test reaches for the parts.

    Workers are named by role and number: c0, g0, m0.
    """

    def __init__(
        self,
        *workers: str,
        config: CentralConfig | None = None,
        router: RouterConfig = HAND_EVERYTHING_OVER,
        term: int = 3,
    ) -> None:
        """Register `workers`, in this order."""
        self.config = config or CentralConfig()
        self.router = router
        self.central = CentralScheduler(self.config, Term(term), router)
        self.claims: list[RequestSpec] | None = []
        self.unreachable: set[str] = set()
        self.now_s = 100.0
        self.workers: dict[str, ModelWorker] = {}
        self.notices: list[DoorNotice] = []
        self.divergences: list[Divergence] = []
        self.names = workers
        self._num_lives = 0
        for name in workers:
            self.start(name)

    # -- the central scheduler's own death -----------------------------------------------------------

    def succeed(self, term: int, *claims: RequestSpec, is_door_slow: bool = False) -> CentralScheduler:
        """The central scheduler dies; a successor asks everyone. Returns the dead one.

        `claims` is what the door owns; a slow one does not answer. Nor do workers in `unreachable`.
        """
        dead, self.central = self.central, CentralScheduler(self.config, Term(term), self.router)
        self.claims = None if is_door_slow else list(claims)
        self.central.take_over([WorkerName(name) for name in self.names], [DOOR], self.now_s)
        self.deliver()
        return dead

    # -- workers -----------------------------------------------------------------------------------

    def start(self, name: str, max_request_tokens: int = 100) -> ModelWorker:
        """Begin a new life of a worker and register it."""
        self._num_lives += 1
        worker = ModelWorker(WorkerName(name), _ROLES[name[0]], Epoch(self._num_lives), max_request_tokens)
        self.workers[name] = worker
        assert self.central.register_worker(worker.registration(), self.now_s)
        self.deliver()
        return worker

    def lose(self, name: str) -> ModelWorker:
        """Kill a worker; the central scheduler is told."""
        worker = self.workers.pop(name)
        self.central.worker_lost(worker.name, "killed", self.now_s)
        self.deliver()
        return worker

    def do(self, name: str, action: Callable[[ModelWorker], object]) -> None:
        """One iteration of a worker: read commands, let something happen, report it."""
        worker = self.workers[name]
        worker.read_commands()
        action(worker)
        worker.flush()
        self.receive(worker)

    def do_each(self, name: str, action: Callable[[ModelWorker, AttemptId], object], *uids: str) -> None:
        """One iteration in which the same thing happens to several requests, in this order."""
        attempt_ids = [self.attempt(name, uid) for uid in uids]
        worker = self.workers[name]
        for attempt_id in attempt_ids:
            action(worker, attempt_id)
        worker.flush()
        self.receive(worker)

    def report_room(self, name: str) -> None:
        """Something was released on a worker."""
        self.do(name, lambda worker: worker.reports.append(RoomReported()))

    def attempt(self, name: str, uid: str) -> AttemptId:
        """The attempt that a worker holds for a request."""
        return self.workers[name].attempt_of(RequestUid(uid))

    def commands(self, name: str) -> list[WorkerCommand]:
        """Everything that a worker was sent so far."""
        return list(self.workers[name].received)

    # -- messages ----------------------------------------------------------------------------------

    def receive(self, worker: ModelWorker) -> None:
        """Bring a worker's messages to the central scheduler, then its commands to everyone."""
        outgoing, worker.outgoing = worker.outgoing, []
        for message in outgoing:
            if isinstance(message, ReportBatch):
                self.central.reports(message, self.now_s)
            else:
                self.divergences += self.central.heartbeat(message, self.now_s)
        self.deliver()

    def deliver(self) -> None:
        """Bring the central scheduler's commands to their receivers; workers read them at once."""
        for command in self.central.take_commands():
            match command:
                case SendToWorker(worker=name, batch=batch, epoch=epoch):
                    worker = self.workers.get(name)
                    if worker is not None and worker.epoch == epoch:
                        worker.inbox.append(batch)
                        worker.read_commands()
                case NotifyDoor(notices=notices):
                    self.notices += notices
                case AskWorker(worker=name, term=term):
                    if name in self.workers and name not in self.unreachable:
                        self.central.introduce(self.workers[name].introduce(term), self.now_s)
                        self.deliver()
                case AskDoor():
                    if self.claims is not None:
                        self.central.claim(DOOR, self.claims, self.now_s)
                        self.deliver()

    # -- the door, and time ------------------------------------------------------------------------

    def submit(self, *specs: RequestSpec) -> SubmitReply:
        """Submit in this order."""
        reply = self.central.submit(DOOR, specs, self.now_s)
        self.deliver()
        return reply

    def cancel(self, *uids: str) -> None:
        """Give requests up."""
        self.central.cancel(DOOR, [RequestUid(uid) for uid in uids], self.now_s)
        self.deliver()

    def advance(self, seconds: float, silent: Sequence[str] = ()) -> None:
        """Let time pass: everyone but `silent` beats, then the central scheduler ticks."""
        self.now_s += seconds
        for name, worker in self.workers.items():
            if name not in silent:
                worker.beat()
                self.receive(worker)
        self.central.tick(self.now_s)
        self.deliver()

    # -- the usual way -----------------------------------------------------------------------------

    def compute_context(self, uid: str, name: str = "c0") -> None:
        """The context half ends with a lease."""
        attempt_id = self.attempt(name, uid)
        self.do(name, lambda worker: worker.finish_context(attempt_id))

    def reserve(self, uid: str, name: str = "g0") -> None:
        """The generation worker takes the offer."""
        attempt_id = self.attempt(name, uid)
        self.do(name, lambda worker: worker.reserve(attempt_id))

    def defer(self, uid: str, name: str = "g0") -> None:
        """The generation worker cannot take the offer now."""
        attempt_id = self.attempt(name, uid)
        self.do(name, lambda worker: worker.defer(attempt_id))

    def activate(self, uid: str, name: str = "g0") -> None:
        """The transfer ends; its lease is settled."""
        attempt_id = self.attempt(name, uid)
        tickets = []
        self.do(name, lambda worker: tickets.append(worker.activate(attempt_id)))
        self.do(tickets[0].owner, lambda owner: owner.end_lease(attempt_id, settled=True))

    def finish(self, uid: str, name: str = "g0") -> None:
        """The last token."""
        attempt_id = self.attempt(name, uid)
        self.do(name, lambda worker: worker.finish(attempt_id))

    def fail(self, uid: str, name: str, *, retriable: bool) -> None:
        """A fault on one worker."""
        attempt_id = self.attempt(name, uid)
        self.do(name, lambda worker: worker.fail(attempt_id, retriable=retriable))

    # -- accounts ----------------------------------------------------------------------------------

    def counter(self, name: str) -> int:
        """A cumulative counter of the central scheduler."""
        value = self.central.state(self.now_s)["counters"][name]
        assert isinstance(value, int)
        return value

    def load(self, name: str) -> tuple[int, int]:
        """(attempts, tokens) that the ledger holds against a worker."""
        states = {state["name"]: state["ledger"] for state in self.central.state(self.now_s)["workers"]}
        return states[name]["attempts"], states[name]["tokens"]

    def assert_idle(self) -> None:
        """Nothing is open, nothing is held, every request ended once (I2, I12)."""
        self.central.audit()
        state = self.central.state(self.now_s)
        counters = state["counters"]
        assert state["central"]["queued"] == state["central"]["running"] == 0
        assert state["central"]["waiting_context"] == state["central"]["waiting_offer"] == 0
        for worker in state["workers"]:
            assert worker["ledger"] == {"attempts": 0, "tokens": 0, "leases": 0}, worker["name"]
        begun = counters["submitted"] + counters["resubmitted"]
        ended = sum(counters[name] for name in ("completed", "failed", "handed_back", "cancelled"))
        assert begun == ended
