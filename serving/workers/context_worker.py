"""The context side of a worker: what happens to a prompt once it is computed.

Hands finished contexts over by ticket and follows their leases to the end. Knows nothing of the step.
"""

from kvtransfer.agent import TransferAgent
from kvtransfer.messages import LeaseOutcome
from manager import LeaseId, PageLease
from scheduler.interface import IterationScheduler
from scheduler.messages import ContextDone, Handoff, LeaseEnded
from scheduler.request import Request
from scheduler.spec import AttemptId
from serving.workers.context_parts import ContextParts
from serving.workers.outbox import Outbox
from serving.workers.staging import PageStaging


class ContextSide:
    """Leases that this worker gave, by attempt."""

    def __init__(
        self,
        scheduler: IterationScheduler,
        agent: TransferAgent,
        outbox: Outbox,
        staging: PageStaging,
        parts: ContextParts,
    ) -> None:
        """All five belong to the same loop."""
        self.parts = parts
        self._scheduler = scheduler
        self._agent = agent
        self._outbox = outbox
        self._staging = staging
        self._leases: dict[AttemptId, LeaseId] = {}
        self._handoffs: dict[AttemptId, Handoff] = {}

    def hand_over(self, request: Request, lease: PageLease, now_s: float) -> None:
        """A context finished: hold its pages for a reader and tell the central scheduler where they are."""
        self._staging.copy_out(lease.pages)
        self._agent.hold(lease, now_s)
        self._leases[request.attempt_id] = lease.lease_id
        handoff = Handoff(self._agent.make_ticket(lease), request.token_ids[-1])
        self._handoffs[request.attempt_id] = handoff
        self._outbox.report(ContextDone(request.attempt_id, handoff))

    def share(self, request: Request, carrier: Request) -> None:
        """Another choice of the carrier's prompt: one ticket for both, and a first token of its own (C4)."""
        ticket = self._handoffs[carrier.attempt_id].ticket
        handoff = Handoff(ticket, request.token_ids[-1])
        self._outbox.report(ContextDone(request.attempt_id, handoff, carrier.attempt_id))

    def handoff(self, attempt_id: AttemptId) -> Handoff | None:
        """What was handed over, while its lease lives."""
        return self._handoffs.get(attempt_id)

    @property
    def leased(self) -> tuple[AttemptId, ...]:
        """Attempts whose pages wait for a reader."""
        return tuple(self._leases)

    def finished_by_first_token(self, request: Request) -> None:
        """Nothing to transfer (C4)."""
        self.parts.drop(request.attempt_id)
        self._outbox.report(ContextDone(request.attempt_id, None))

    def drop_lease(self, attempt_id: AttemptId, now_s: float) -> None:
        """The attempt was cancelled, or failed: nobody will read its pages."""
        self.parts.drop(attempt_id)
        lease_id = self._leases.get(attempt_id)
        # False: it has ended before, and its outcome is on its way to `on_lease`.
        if lease_id is not None and self._agent.drop_lease(lease_id):
            del self._leases[attempt_id]
            self._handoffs.pop(attempt_id, None)
            self._scheduler.on_lease_ended(lease_id, now_s, settled=False)

    def on_lease(self, outcome: LeaseOutcome, now_s: float) -> None:
        """A lease was settled, expired or dropped: its pages are the manager's again."""
        if self.parts.on_lease(outcome.lease_id):
            return
        self.parts.drop(AttemptId(outcome.request_id))
        self._leases.pop(AttemptId(outcome.request_id), None)
        self._handoffs.pop(AttemptId(outcome.request_id), None)
        request = self._scheduler.on_lease_ended(outcome.lease_id, now_s, settled=outcome.settled)
        if request is not None:
            self._outbox.report(LeaseEnded(request.attempt_id, outcome.lease_id, outcome.settled))
