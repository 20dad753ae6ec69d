"""`HandoffWorker`: one life of a worker in a handoff world, made of the real loop, scheduler, manager and agent.

Its clock is its own: it starts somewhere else than everybody's, so that a timestamp that crossed processes would
be found out. `is_paused` stands for a stopped process: nothing of it moves but what a wire writes by itself.
"""

import threading
from collections.abc import Callable, Container
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from configs import CentralConfig, SchedulerConfig, TransferConfig
from kvtransfer.agent import TransferAgent
from kvtransfer.messages import GroupLayout, PoolLayout, ReaderId, ReceiveOutcome, ReceiveResult
from kvtransfer.peers import PeerChannel
from kvtransfer.transports.inprocess import InProcessRegistry, InProcessTransport
from manager import KVCacheManagerV2, LeaseId, TierLevel
from manager.errors import CopyFailedError
from scheduler.admission import TransferAdmission
from scheduler.introductions import WorkerIntroduction
from scheduler.kv_cache_v2_scheduler import KVCacheV2Scheduler
from scheduler.messages import (
    CommandBatch,
    ReportBatch,
    TokenBatch,
    WorkerHeartbeat,
    WorkerRegistration,
    WorkerRole,
)
from scheduler.policy import CacheShape
from scheduler.spec import AttemptId, Term
from serving.workers.batch_builder import BatchBuilder
from serving.workers.draw_rules import DrawRules
from serving.workers.outbox import Outbox
from serving.workers.self_audit import SelfAudit
from serving.workers.staging import SharedPool
from serving.workers.step_loop import WorkerLoop
from serving.workers.stop_checker import StopChecker, StopStringDetector
from serving.workers.worker_parts import WorkerParts
from serving.workers.worker_plan import WorkerIdentity
from tests.fakes.cache_builders import make_geometry
from tests.fakes.handoff_engine import HandoffEngine, PlainCopies
from tests.fakes.page_contents import PageContents
from tests.fakes.transfer_transport import GatedTransport

PAGE_BYTES = 32
Message = ReportBatch | WorkerHeartbeat | TokenBatch | WorkerIntroduction


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldShape:
    """What a world is made of; small, so that everything runs short of everything.

    Attributes:
        pages: device pages of each worker.
        window_pages: the transfer window, in pages; None is without limit.
        is_gated: the wire writes by itself and stops when it likes; else bytes move in the agent's polls.
    """

    context_workers: int = 1
    generation_workers: int = 1
    mixed_workers: int = 0
    pages: int = 16
    host_pages: int = 0
    disk_pages: int = 0
    max_sequences: int = 4
    window_pages: int | None = None
    is_gated: bool = False
    scheduler: SchedulerConfig = field(
        default_factory=lambda: SchedulerConfig(max_num_tokens=24, max_batch_size=4, chunk_unit_tokens=4)
    )
    transfer: TransferConfig = field(default_factory=TransferConfig)
    central: CentralConfig = field(default_factory=CentralConfig)


class HandoffWorker:
    """One life. Implements the loop's `WorkerSinks`: what it says waits in `outgoing`, in order."""

    def __init__(
        self,
        identity: WorkerIdentity,
        shape: WorldShape,
        registry: InProcessRegistry,
        peers: PeerChannel,
        clock: Callable[[], float],
        readers_told_ok: Container[ReaderId] = (),
    ) -> None:
        """Build it; it does nothing until it is turned. `readers_told_ok`: whose settle was answered OK so far."""
        self.identity = identity
        self.shape = shape
        self.is_alive = True
        self.is_paused = False
        self.is_changed = False
        self.outgoing: list[Message] = []
        self._offset_s = 1000.0 * identity.epoch
        self._clock = clock
        self._readers_told_ok = readers_told_ok
        geometry, cache = make_geometry(
            shape.pages,
            max_sequences=shape.max_sequences,
            host_slots=shape.host_pages,
            disk_slots=shape.disk_pages,
            head_dim=4,
        )
        self.contents = PageContents(geometry)
        self.copies = PlainCopies(self.contents.by_store())
        self.manager = KVCacheManagerV2(geometry, cache, identity.epoch, self.copies)
        self.window = TransferAdmission(None if shape.window_pages is None else shape.window_pages * PAGE_BYTES)
        self.scheduler = KVCacheV2Scheduler(
            shape.scheduler, self.manager, identity.role, CacheShape.of(geometry), window=self.window
        )
        transport_class = GatedTransport if shape.is_gated else InProcessTransport
        self.transport = transport_class(registry, identity.name, PAGE_BYTES)
        self.transport.register(self.contents.pools[TierLevel.DEVICE, geometry.pool_groups[0].pool_group_id].memory)
        group = GroupLayout((0,), window=None, num_sink_tokens=0, page_bytes=PAGE_BYTES)
        layout = PoolLayout("handoff", 1, 4, geometry.tokens_per_block, "uint8", (group,))
        self.agent = TransferAgent(self.transport, peers, shape.transfer, layout, identity.name, identity.epoch)
        self.engine = HandoffEngine(self.contents, self.manager, self._tokens_of)
        self.loop = WorkerLoop(identity, self._parts(), self.now_s)

    def _parts(self) -> WorkerParts:
        groups = [group.layer_group_id for group in self.manager.geometry.layer_groups]
        return WorkerParts(
            manager=self.manager,
            scheduler=self.scheduler,
            engine=self.engine,
            agent=self.agent,
            batch_builder=BatchBuilder(self.manager, groups, DrawRules((), None)),
            stop_checker=StopChecker((), _no_stop_strings),
            outbox=Outbox(self.identity.name, self.identity.epoch, self),
            staging=SharedPool(),
            wake=threading.Event(),
            self_audit=SelfAudit(self.manager.audit, period_s=0.0, max_share=1.0, clock=self.now_s),
        )

    def registration(self) -> WorkerRegistration:
        """The first word to the central scheduler."""
        identity = self.identity
        most = self.manager.max_request_tokens
        return WorkerRegistration(identity.name, identity.role, identity.epoch, identity.pid, most)

    # -- WorkerSinks -----------------------------------------------------------------------------------

    def send_reports(self, batch: ReportBatch) -> None:
        """To the central scheduler."""
        self.outgoing.append(batch)

    def send_heartbeat(self, heartbeat: WorkerHeartbeat) -> None:
        """To the central scheduler."""
        self.outgoing.append(heartbeat)

    def send_tokens(self, batch: TokenBatch) -> None:
        """To the door."""
        self.outgoing.append(batch)

    # -- turns -----------------------------------------------------------------------------------------

    def now_s(self) -> float:
        """Its own clock."""
        return self._clock() + self._offset_s

    @property
    def is_running(self) -> bool:
        """Whether its threads can move."""
        return self.is_alive and not self.is_paused

    def post(self, batch: CommandBatch) -> None:
        """Commands arrive; a stopped process finds them when it wakes."""
        self.loop.post(batch)

    def introduce(self, term: Term) -> None:
        """A term asks what is held here; the loop answers between two iterations, in order with its reports."""
        self.loop.introduce(term, self.registration(), self.outgoing.append)

    def run_loop(self) -> bool:
        """One iteration: all that touches the manager. A tier that cannot be written ends the process."""
        if not self.is_running:
            return False
        self.is_changed = True
        leased = self._leased_bytes()
        try:
            is_busy = self.loop.run_once()
        except CopyFailedError:
            self.manager.audit()
            self.die()
            return True
        after = self._leased_bytes()
        for lease_id, content in leased.items():
            if after.get(lease_id, content) != content:
                self.engine.violations.append(f"{self.identity.name}: pages of lease {lease_id} were written")
        return is_busy

    def poll(self) -> None:
        """One turn of the agent's thread; only pages that are being filled may change."""
        if not self.is_running:
            return
        readers = {request_id: receive.session.reader for request_id, receive in self.agent._receives.items()}
        self._watched(lambda: self.agent.poll(self.now_s()))
        for outcome in self.agent._outcomes:
            is_verified = isinstance(outcome, ReceiveOutcome) and outcome.result is ReceiveResult.VERIFIED
            reader = readers.get(outcome.request_id) if is_verified else None
            if reader is not None and reader not in self._readers_told_ok:
                self.engine.violations.append(f"{outcome.request_id} is verified and no owner said OK")

    def move_bytes(self) -> None:
        """The wire writes by itself, stopped process or not."""
        if self.is_alive and isinstance(self.transport, GatedTransport):
            self._watched(self.transport.move)

    def beat(self) -> None:
        """A heartbeat is on its way."""
        if self.is_running:
            account = self.loop.snapshot()
            beat = WorkerHeartbeat(account.worker, account.epoch, account.iteration, self.loop.longest_step_s, account)
            self.send_heartbeat(beat)

    def die(self) -> None:
        """Kill -9: its memory is gone, and nothing of it moves again."""
        self.is_alive = False
        self.agent.close()

    # -- truth -----------------------------------------------------------------------------------------

    def audit(self) -> None:
        """The manager's, unless nothing can have changed since the last one."""
        if self.is_alive and self.is_changed:
            self.manager.audit()
            self.is_changed = False

    def _watched(self, action: Callable[[], object]) -> None:
        pages = self._device_pages()
        before = pages.copy()
        action()
        changed = {int(slot) for slot in (pages != before).any(axis=1).nonzero()[0]}
        foreign = changed - self.writable_slots()
        if foreign:
            self.engine.violations.append(f"{self.identity.name}: a read wrote into slots {sorted(foreign)}")

    def _leased_bytes(self) -> dict[LeaseId, bytes]:
        """What a reader of each lease would read now."""
        pages = self.manager._parts().storage.pages
        device = self._device_pages()
        return {
            lease_id: b"".join(device[pages.slot[page]].tobytes() for group in held.pages for page in group)
            for lease_id, held in self.manager._leases.items()
        }

    def _device_pages(self) -> npt.NDArray[np.uint8]:
        """[num_slots, page_bytes], a view."""
        pool = self.contents.pools[TierLevel.DEVICE, self.manager.geometry.pool_groups[0].pool_group_id]
        return pool.memory.reshape(-1, PAGE_BYTES)

    def writable_slots(self) -> set[int]:
        """Slots that a read may write: of reservations, and quarantined ones."""
        table = self.scheduler._table
        slots = {int(page.slot) for request_id in table.receiving for page in self.manager.pages_to_fill(request_id)}
        pages = self.manager._parts().storage.pages
        for held in self.manager._quarantine.by_request().values():
            slots |= {pages.slot[page] for group in held.pages for page in group}
        return slots

    def leftovers(self) -> list[str]:
        """What is held when everything is over; empty at the baseline (I12)."""
        left = []
        stats = self.manager.stats()
        for tier, counts in stats.tiers.items():
            if counts.free + counts.cached != counts.total or counts.leased or counts.reserved or counts.quarantined:
                left.append(f"{tier}: {counts}")
        if stats.index_slots_free != stats.index_slots_total:
            left.append(f"index slots {stats.index_slots_free} of {stats.index_slots_total}")
        sides = (self.loop._generation_side, self.loop._context_side)
        tables = {
            "agent leases": self.agent.num_leases,
            "agent receives": self.agent.num_active,
            "agent reservations": self.agent.num_reservations,
            "window bytes": self.window.taken_bytes,
            "running": len(self.scheduler.running),
            "waiting": len(self.scheduler.waiting),
            "handoffs": len(sides[0]._handoffs) + len(sides[0]._filling),
            "given leases": len(sides[1]._leases),
            "phases": len(self.loop._phases._attempts),
            "stop checkers": len(self.loop._parts.stop_checker._detectors),
        }
        left += [f"{name}: {count}" for name, count in tables.items() if count]
        return [f"{self.identity.name}: {what}" for what in left]

    def _tokens_of(self, request_id: str) -> list[int]:
        request = self.scheduler.get(AttemptId(request_id))
        assert request is not None, f"{request_id} is in a step and unknown"
        return list(request.token_ids)


def _no_stop_strings(stop_strings: object, min_tokens: int) -> StopStringDetector:
    msg = f"requests of a handoff world have no text to find {stop_strings} in"
    raise ValueError(msg)


ROLES = {"c": WorkerRole.CONTEXT, "g": WorkerRole.GENERATION, "m": WorkerRole.MIXED}
