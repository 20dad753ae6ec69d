"""The generation side of a worker: offers, the receiving of pages, activation.

An offer holds nothing; a reservation holds pages that only the agent writes; an activated request is an
ordinary decode. Knows nothing of the step.
"""

from collections.abc import Sequence

from kvtransfer.agent import TransferAgent
from kvtransfer.messages import ReceiveOutcome, ReceiveResult, ReservationExpired, TransferTicket
from manager import KVCacheManager, PageLocation, RequestId
from scheduler.interface import IterationScheduler
from scheduler.messages import Activated, DeliverHandoff, ErrorKind, Failed, Handoff, OfferGeneration, Reserved
from scheduler.request import Request
from scheduler.spec import AttemptId
from scheduler.states import AttemptState
from serving.workers.outbox import Outbox
from serving.workers.phase_clock import PhaseClock
from serving.workers.staging import PageStaging


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
        self._filling: dict[AttemptId, Sequence[PageLocation]] = {}

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
            self._read(request, command.handoff, now_s)

    def handoff(self, attempt_id: AttemptId) -> Handoff | None:
        """The ticket that came with the offer or after it, until it is activated."""
        return self._handoffs.get(attempt_id)

    def on_reserved(self, request: Request, now_s: float) -> None:
        """A reservation was committed: read its pages, or wait for the context that fills them."""
        self._outbox.report(Reserved(request.attempt_id))
        self._agent.hold_reservation(request.request_id, now_s)
        handoff = self._handoffs.get(request.attempt_id)
        if handoff is not None:
            self._read(request, handoff, now_s)

    def stop_receive(self, request: Request, now_s: float) -> None:
        """The attempt was cancelled while it held a reservation; its pages are quarantined."""
        if request.attempt_id in self._filling:
            self._agent.cancel_receive(request.request_id)
        else:
            # Nothing was ever read into them.
            self._scheduler.on_receive_ended(request.request_id, now_s)

    def _read(self, request: Request, handoff: Handoff, now_s: float) -> None:
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
        pages = tuple(self._manager.pages_to_fill(request.request_id))
        self._filling[request.attempt_id] = pages
        self._agent.start_receive(request.request_id, ticket, pages, now_s)

    def on_receive(self, outcome: ReceiveOutcome, now_s: float) -> None:
        """A receive ended: activate what was verified, release everything else (I7)."""
        if outcome.result is ReceiveResult.VERIFIED:
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
        self._phases.forget(attempt_id)
        message = f"attempt {attempt_id}: its reservation was not activated before its deadline"
        self._outbox.report(Failed(attempt_id, ErrorKind.TRANSFER, message, retriable=True))
        return True

    def forget(self, attempt_id: AttemptId) -> None:
        """The attempt has ended here, or was deferred."""
        self._agent.release_reservation(RequestId(attempt_id))
        self._handoffs.pop(attempt_id, None)
        self._filling.pop(attempt_id, None)

    def _activate(self, request_id: RequestId, now_s: float) -> None:
        handoff = self._handoffs.pop(AttemptId(request_id), None)
        if handoff is None:
            # The attempt was cancelled while its pages arrived: only its quarantine is left.
            self._scheduler.on_receive_ended(request_id, now_s)
            return
        self._agent.release_reservation(request_id)
        self._staging.copy_in(self._filling.pop(AttemptId(request_id)))
        followers = tuple(follower.attempt_id for follower in self._scheduler.followers_of(request_id))
        request = self._scheduler.on_received(request_id, handoff.first_token_id, now_s)
        if request is not None:
            self._phases.enter(request.attempt_id, "generation", now_s)
            for attempt_id in followers:
                self._phases.enter(attempt_id, "queue", now_s)
            self._outbox.report(Activated(request.attempt_id, followers))

    def _end_receive(self, request_id: RequestId, message: str, now_s: float) -> None:
        self.forget(AttemptId(request_id))
        request = self._scheduler.on_receive_ended(request_id, now_s)
        if request is not None:
            self._phases.forget(request.attempt_id)
            self._outbox.report(Failed(request.attempt_id, ErrorKind.TRANSFER, message, retriable=True))
