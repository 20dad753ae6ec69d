"""The generation side of a worker: offers, the receiving of pages, activation.

An offer holds nothing; a reservation holds pages that only the agent writes; an activated request is an
ordinary decode. Knows nothing of the step.
"""

from dataclasses import dataclass

from kvtransfer.agent import TransferAgent
from kvtransfer.messages import ReceiveOutcome, ReceiveResult, ReservationExpired, TransferTicket
from manager import KVCacheManager, PageLocation, RequestId
from scheduler.interface import IterationScheduler
from scheduler.messages import (
    Activated,
    DeliverHandoff,
    ErrorKind,
    Failed,
    Handoff,
    OfferGeneration,
    Reserved,
)
from scheduler.request import Request
from scheduler.spec import AttemptId
from scheduler.states import AttemptState
from scheduler.tickets import DeliverPart
from serving.workers.outbox import Outbox
from serving.workers.phase_clock import PhaseClock
from serving.workers.staging import PageStaging


@dataclass(slots=True)
class _Filling:
    """What a reservation still waits for.

    Attributes:
        pages: all that the transfer fills.
        missing: those that no settled part has brought.
        reading: those of the receive under way; None when none is.
        is_final: whether that receive is of the final ticket.
    """

    pages: tuple[PageLocation, ...]
    missing: tuple[PageLocation, ...]
    reading: tuple[PageLocation, ...] | None = None
    is_final: bool = False


class GenerationSide:
    """Handoffs that this worker was offered, by attempt."""

    def __init__(
        self,
        manager: KVCacheManager,
        scheduler: IterationScheduler,
        agent: TransferAgent,
        outbox: Outbox,
        phases: PhaseClock,
        staging: PageStaging,
    ) -> None:
        """All six belong to the same loop."""
        self._manager = manager
        self._scheduler = scheduler
        self._agent = agent
        self._outbox = outbox
        self._phases = phases
        self._staging = staging
        self._handoffs: dict[AttemptId, Handoff] = {}
        self._parts: dict[AttemptId, TransferTicket] = {}
        self._filling: dict[AttemptId, _Filling] = {}
        self.num_parts = 0
        """Parts that were read and settled."""
        self.exposed_bytes = 0
        """Bytes that were read after their context was done."""

    def offer(self, command: OfferGeneration, now_s: float) -> None:
        """Queue the offer for the next plan. Raises RequestTooLarge."""
        self._scheduler.add_generation_offer(
            command.attempt_id, command.spec, command.handoff, now_s, command.followers
        )
        if command.handoff is not None:
            self._handoffs[command.attempt_id] = command.handoff

    def deliver(self, command: DeliverHandoff, now_s: float) -> None:
        """The finished context of a generation-first offer; its pages are read if they have a place already."""
        request = self._scheduler.get(command.attempt_id)
        if request is None or command.attempt_id in self._handoffs:
            return  # it has ended, or a new term says again what is known
        self._handoffs[command.attempt_id] = command.handoff
        if request.state is AttemptState.DISAGG_GENERATION_TRANS_IN_PROGRESS:
            self._read_on(command.attempt_id, now_s)

    def deliver_part(self, command: DeliverPart, now_s: float) -> None:
        """Full blocks of a context that goes on; the newest part contains every earlier one."""
        is_waiting = self._scheduler.get(command.attempt_id) is not None and command.attempt_id not in self._handoffs
        if is_waiting and isinstance(command.ticket, TransferTicket):
            self._parts[command.attempt_id] = command.ticket
            self._read_on(command.attempt_id, now_s)

    def handoff(self, attempt_id: AttemptId) -> Handoff | None:
        """The ticket that came with the offer or after it, until it is activated."""
        return self._handoffs.get(attempt_id)

    def on_reserved(self, request: Request, now_s: float) -> None:
        """A reservation was committed: read its pages, or wait for the context that fills them."""
        self._outbox.report(Reserved(request.attempt_id))
        self._agent.hold_reservation(request.request_id, now_s)
        pages = tuple(self._manager.pages_to_fill(request.request_id))
        self._filling[request.attempt_id] = _Filling(pages, pages)
        self._read_on(request.attempt_id, now_s)

    def stop_receive(self, request: Request, now_s: float) -> None:
        """The attempt was cancelled while it held a reservation; its pages are quarantined."""
        filling = self._filling.get(request.attempt_id)
        if filling is not None and filling.reading is not None:
            self._agent.cancel_receive(request.request_id)
        else:
            # Nothing is being read into them.
            self._scheduler.on_receive_ended(request.request_id, now_s)

    def _read_on(self, attempt_id: AttemptId, now_s: float) -> None:
        """Start the next receive of a reservation, if it has none and there is something to read."""
        filling, request = self._filling.get(attempt_id), self._scheduler.get(attempt_id)
        if filling is None or request is None or filling.reading is not None:
            return
        handoff, part = self._handoffs.get(attempt_id), self._parts.pop(attempt_id, None)
        if handoff is not None:
            self._read_rest(request, handoff, filling, now_s)
        elif part is not None:
            tokens_per_block = self._agent.layout.tokens_per_block
            full = tuple(page for page in filling.missing if (page.block + 1) * tokens_per_block <= part.num_tokens)
            if full:
                filling.reading = full
                self._agent.start_receive(request.request_id, part, full, now_s)

    def _read_rest(self, request: Request, handoff: Handoff, filling: _Filling, now_s: float) -> None:
        ticket = handoff.ticket
        if not isinstance(ticket, TransferTicket):
            message = f"attempt {request.attempt_id}: ticket of unknown type {type(ticket).__name__}"
            self._end_receive(request.request_id, message, now_s)
            return
        if ticket.num_tokens != request.prompt_length:
            # Positions that no page covers would count as computed (I7).
            message = f"attempt {request.attempt_id}: ticket of {ticket.num_tokens} tokens for {request.prompt_length}"
            self._end_receive(request.request_id, message, now_s)
            return
        filling.reading, filling.is_final = filling.missing, True
        self._agent.start_receive(request.request_id, ticket, filling.missing, now_s)

    def on_receive(self, outcome: ReceiveOutcome, now_s: float) -> None:
        """A receive ended: activate what was verified, release everything else (I7)."""
        attempt_id = AttemptId(outcome.request_id)
        filling = self._filling.get(attempt_id)
        is_verified = outcome.result is ReceiveResult.VERIFIED
        if filling is not None and not filling.is_final:
            # What a part failed to bring is in the next one, or in the final ticket.
            if is_verified:
                self.num_parts += 1
                brought = frozenset(filling.reading or ())
                filling.missing = tuple(page for page in filling.missing if page not in brought)
            filling.reading = None
            self._read_on(attempt_id, now_s)
        elif is_verified:
            self.exposed_bytes += outcome.num_bytes
            self._activate(outcome.request_id, now_s)
        else:
            message = outcome.message or f"attempt {outcome.request_id}: transfer {outcome.result}"
            self._end_receive(outcome.request_id, message, now_s)

    def on_reservation_expired(self, outcome: ReservationExpired, now_s: float) -> bool:
        """Its deadline has come: the attempt fails; pages that may still be written stay quarantined (M7).

        Returns:
            False when it was activated or ended before: the signal is late.
        """
        attempt_id = AttemptId(outcome.request_id)
        request = self._scheduler.get(attempt_id)
        if request is None or request.state is not AttemptState.DISAGG_GENERATION_TRANS_IN_PROGRESS:
            return False
        self._scheduler.fail(attempt_id, now_s)
        self.stop_receive(request, now_s)
        self.forget(attempt_id)
        self._phases.forget(attempt_id, now_s)
        message = f"attempt {attempt_id}: its reservation was not activated before its deadline"
        self._outbox.report(Failed(attempt_id, ErrorKind.TRANSFER, message, retriable=True))
        return True

    def forget(self, attempt_id: AttemptId) -> None:
        """The attempt has ended here, or was deferred."""
        self._agent.release_reservation(RequestId(attempt_id))
        self._handoffs.pop(attempt_id, None)
        self._parts.pop(attempt_id, None)
        self._filling.pop(attempt_id, None)

    def _activate(self, request_id: RequestId, now_s: float) -> None:
        handoff = self._handoffs.pop(AttemptId(request_id), None)
        if handoff is None:
            # The attempt was cancelled while its pages arrived: only its quarantine is left.
            self._scheduler.on_receive_ended(request_id, now_s)
            return
        self._agent.release_reservation(request_id)
        self._staging.copy_in(self._filling.pop(AttemptId(request_id)).pages)
        followers = self._scheduler.followers_of(request_id)
        request = self._scheduler.on_received(request_id, handoff.first_token_id, now_s)
        if request is not None:
            self._phases.enter(request.attempt_id, "generation", now_s)
            for follower in followers:
                self._phases.admit(follower.attempt_id, follower.spec.uid, "queue", 0.0, now_s)
            self._outbox.report(Activated(request.attempt_id, tuple(follower.attempt_id for follower in followers)))

    def _end_receive(self, request_id: RequestId, message: str, now_s: float) -> None:
        self.forget(AttemptId(request_id))
        request = self._scheduler.on_receive_ended(request_id, now_s)
        if request is not None:
            self._phases.forget(request.attempt_id, now_s)
            self._outbox.report(Failed(request.attempt_id, ErrorKind.TRANSFER, message, retriable=True))
