"""`SimulatedDeployment`: central scheduler, workers, network and door of one run, driven by one queue of events."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from random import Random

from manager import Epoch, PageCounts, WorkerName
from scheduler.central import CentralScheduler, NotifyDoor, SendToWorker
from scheduler.messages import ReportBatch, WorkerHeartbeat, WorkerRole
from scheduler.spec import RequestSpec, RequestUid, Term
from serving.simulation.arrivals import Arrival
from serving.simulation.door import DOOR, SimulatedDoor
from serving.simulation.event_queue import EventQueue
from serving.simulation.network import VirtualNetwork
from serving.simulation.settings import SimulationSettings
from serving.simulation.worker import Receivers, SimulatedWorker, WorkerMaking
from serving.workers.worker_plan import WorkerIdentity, worker_names

_TICK_S = 0.1
_NO_PROCESS = 0


class SimulationError(Exception):
    """A run that did not come to its end, or left something behind; the message has the numbers."""


class SimulatedDeployment:
    """One run. Build, `run` once, then read.

    Attributes:
        settings: what it was built from.
        events: the clock.
        central: the real central scheduler.
        door: every stream.
        workers: the present life of each worker.
        past_lives: those that died.
        divergences: differences between ledger and workers that the central scheduler repaired.
    """

    def __init__(self, settings: SimulationSettings, making: WorkerMaking | None = None) -> None:
        """Everything is there and idle. Raises CacheConfigError for pools that cannot work."""
        self.settings = settings
        self.events = EventQueue()
        self._making = WorkerMaking() if making is None else making
        self._network = VirtualNetwork(self.events, settings.network)
        self._receivers = Receivers(self._on_reports, self._on_heartbeat, lambda batch: self.door.on_tokens(batch))
        self.central = CentralScheduler(settings.central, Term(1), settings.router)
        self.door = SimulatedDoor(self.events, self._submit, self._cancel)
        self.workers: dict[WorkerName, SimulatedWorker] = {}
        self.past_lives: list[SimulatedWorker] = []
        self.divergences: list[str] = []
        self._num_epochs = 0
        for name, role in worker_names(settings.cluster):
            self._start_life(WorkerName(name), role)

    def run(self, arrivals: Sequence[Arrival]) -> None:
        """Serve all of `arrivals`, then prove that nothing is held (I12). See `serve` and `check_baseline`."""
        self.serve(arrivals)
        self.check_baseline()

    def serve(self, arrivals: Sequence[Arrival]) -> None:
        """Serve all of `arrivals`. Once.

        Raises:
            SimulationError: requests are still open at `limit_s`.
            StreamError: a token was lost, repeated or invented.
            CorruptedError: an audit failed.
        """
        self.door.expect(arrivals)
        self._tick()
        self._plan_deaths(min((arrival.at_s for arrival in arrivals), default=0.0))
        if not self.events.run_while(lambda: self.door.num_open > 0, self.settings.limit_s):
            msg = f"{self.door.num_open} requests are open at {self.events.now_s:.1f} s: {self._stuck()}"
            raise SimulationError(msg)

    def check_baseline(self) -> None:
        """Let leases, cancels and restarts come to their end. Raises SimulationError where anything is held then."""
        faults = self.settings.faults
        slack_s = self.settings.transfer.lease_duration_s + faults.transfer_stall_s + faults.restart_s + 1
        self.events.run_until(self.events.now_s + slack_s)
        self.central.audit()
        for worker in self.workers.values():
            if worker.is_alive:
                _check_idle(worker)

    @property
    def lives(self) -> list[SimulatedWorker]:
        """Every life of every worker, the dead first."""
        return [*self.past_lives, *self.workers.values()]

    # -- messages ----------------------------------------------------------------------------------------

    def _submit(self, spec: RequestSpec) -> None:
        def arrive() -> None:
            refused = self.central.submit(DOOR, [spec], self.events.now_s).refused
            self._deliver()
            if refused:
                self._after_message(lambda: self.door.on_notices(refused))

        self._after_message(arrive)

    def _cancel(self, uid: RequestUid) -> None:
        def arrive() -> None:
            self.central.cancel(DOOR, [uid], self.events.now_s)
            self._deliver()

        self._after_message(arrive)

    def _on_reports(self, batch: ReportBatch) -> None:
        self.central.reports(batch, self.events.now_s)
        self._deliver()

    def _on_heartbeat(self, heartbeat: WorkerHeartbeat) -> None:
        found = self.central.heartbeat(heartbeat, self.events.now_s)
        self.divergences += [divergence.message for divergence in found]
        self._deliver()

    def _tick(self) -> None:
        self.central.tick(self.events.now_s)
        self._deliver()
        self.events.after(_TICK_S, self._tick)

    def _deliver(self) -> None:
        for command in self.central.take_commands():
            match command:
                case SendToWorker():
                    self._after_message(partial(self._hand_to_worker, command))
                case NotifyDoor(notices=notices):
                    self._after_message(partial(self.door.on_notices, notices))

    def _hand_to_worker(self, command: SendToWorker) -> None:
        worker = self.workers[command.worker]
        if worker.identity.epoch == command.epoch:
            worker.post(command.batch)

    def _after_message(self, action: Callable[[], None]) -> None:
        self.events.after(self.settings.network.message_s, action)

    # -- lives and deaths --------------------------------------------------------------------------------

    def _start_life(self, name: WorkerName, role: WorkerRole) -> None:
        self._num_epochs += 1
        identity = WorkerIdentity(name, role, Epoch(self._num_epochs), _NO_PROCESS)
        worker = SimulatedWorker(identity, self.settings, self._network, self._receivers, self._making)
        self.workers[name] = worker
        worker.start()
        self.central.register_worker(worker.registration(), self.events.now_s)
        self._deliver()

    def _plan_deaths(self, first_s: float) -> None:
        faults = self.settings.faults
        random = Random(f"deaths {self.settings.seed}")
        for _ in range(faults.worker_deaths):
            name = random.choice(list(self.workers))
            at_s = first_s + random.random() * faults.death_window_s
            self.events.at(max(at_s, self.events.now_s), partial(self._kill, name))

    def _kill(self, name: WorkerName) -> None:
        worker = self.workers[name]
        if not worker.is_alive:
            return
        worker.die()
        self.events.after(self.settings.faults.restart_s, partial(self._restart, worker))

    def _restart(self, worker: SimulatedWorker) -> None:
        self.past_lives.append(worker)
        self._start_life(worker.identity.name, worker.identity.role)

    # -- the end -----------------------------------------------------------------------------------------

    def _stuck(self) -> dict[str, int]:
        phases: dict[str, int] = {}
        for worker in self.workers.values():
            phases[f"{worker.identity.name} running"] = len(worker.scheduler.running)
            phases[f"{worker.identity.name} waiting"] = len(worker.scheduler.waiting)
        return phases


def _check_idle(worker: SimulatedWorker) -> None:
    worker.manager.audit()
    stats = worker.manager.stats()
    for tier, counts in stats.tiers.items():
        if replace(counts, free=0, cached=0, total=0) != PageCounts():
            msg = f"{worker.identity.name} holds pages of tier {tier} when all is over: {counts}"
            raise SimulationError(msg)
    if stats.index_slots_free != stats.index_slots_total or worker.agent.num_leases:
        msg = f"{worker.identity.name} holds index slots or leases when all is over: {stats}"
        raise SimulationError(msg)
