"""`ContextParts`: full blocks of contexts that are still computed, offered to a reader that waits for them.

A part is a lease of its own with a ticket of its own; it ends by its reader's settle, by expiry, or with its attempt.
Nothing depends on a part being read: what was not is in the final ticket.
"""

from collections.abc import Sequence

from kvtransfer.agent import TransferAgent
from manager import KVCacheManager, LeaseId
from scheduler.interface import IterationScheduler
from scheduler.output import ContextChunk
from scheduler.request import Request
from scheduler.spec import AttemptId
from scheduler.tickets import ContextPart
from serving.workers.outbox import Outbox
from serving.workers.staging import PageStaging


class ContextParts:
    """Leases of parts, by attempt. The loop's thread."""

    def __init__(
        self,
        manager: KVCacheManager,
        scheduler: IterationScheduler,
        agent: TransferAgent,
        outbox: Outbox,
        staging: PageStaging,
    ) -> None:
        """All five belong to the same loop."""
        self._manager = manager
        self._scheduler = scheduler
        self._agent = agent
        self._outbox = outbox
        self._staging = staging
        self._num_blocks: dict[AttemptId, int] = {}
        """Attempts that have a reader, and how many of their blocks it was offered."""
        self._leases: dict[LeaseId, AttemptId] = {}
        self.num_offered = 0

    @property
    def num_leases(self) -> int:
        """Parts that wait for their reader."""
        return len(self._leases)

    def expect(self, attempt_id: AttemptId) -> None:
        """A reader waits for this context."""
        self._num_blocks[attempt_id] = 0

    def offer(self, chunks: Sequence[ContextChunk], now_s: float) -> None:
        """A step is complete: lease what it has filled of contexts that go on."""
        for chunk in chunks:
            if not chunk.is_last and not chunk.request.is_terminal and chunk.request.attempt_id in self._num_blocks:
                self._offer(chunk.request, chunk.start + chunk.num_tokens, now_s)

    def _offer(self, request: Request, num_tokens: int, now_s: float) -> None:
        tokens_per_block = self._agent.layout.tokens_per_block
        num_blocks, offered = num_tokens // tokens_per_block, self._num_blocks[request.attempt_id]
        if num_blocks <= offered or self._manager.draft_lag(request.request_id):
            return
        part = self._scheduler.lease_part(request, num_blocks * tokens_per_block)
        self._staging.copy_out([page for page in part.pages if page.block >= offered])
        self._agent.hold(part, now_s)  # never renewed: the next part, or the final ticket, contains it
        self._leases[part.lease_id] = request.attempt_id
        self._num_blocks[request.attempt_id] = num_blocks
        self.num_offered += 1
        self._outbox.report(ContextPart(request.attempt_id, self._agent.make_ticket(part)))

    def on_lease(self, lease_id: LeaseId) -> bool:
        """A lease was settled or has expired; False when it is none of ours."""
        if self._leases.pop(lease_id, None) is None:
            return False
        self._scheduler.end_part(lease_id)
        return True

    def drop(self, attempt_id: AttemptId) -> None:
        """The attempt is over, or its final lease: nobody will read its parts. May be called again."""
        self._num_blocks.pop(attempt_id, None)
        for lease_id in [lease_id for lease_id, owner in self._leases.items() if owner == attempt_id]:
            # False: it has ended already, and its outcome is on its way to `on_lease`.
            if self._agent.drop_lease(lease_id):
                del self._leases[lease_id]
                self._scheduler.end_part(lease_id)
