"""What happens to an attempt outside a step: it is cancelled, fails, is received, or its lease ends.

Each call is one complete transaction, applied to requests and places after its commit. A signal for an
attempt that is unknown or over changes nothing and is counted: late signals are normal (M7).
"""

from collections import Counter

from manager import KVCacheManager, LeaseId, PageLease, RequestId
from scheduler.admission import TransferWindow
from scheduler.request import Request
from scheduler.request_table import RequestTable
from scheduler.states import AttemptEvent, AttemptState
from scheduler.transaction_scope import TransactionScope


class HandoffOutcomes:
    """Moves attempts on what the loop hears between steps.

    Attributes:
        counters: `late_signals`, shared with the scheduler's other counts.
    """

    __slots__ = ("_manager", "_table", "_window", "counters")

    def __init__(
        self, manager: KVCacheManager, table: RequestTable, window: TransferWindow, counters: "Counter[str]"
    ) -> None:
        """The collaborators of one worker's scheduler."""
        self._manager = manager
        self._table = table
        self._window = window
        self.counters = counters

    def end(self, request: Request, event: AttemptEvent, now_s: float) -> None:
        """Cancel or fail: release all that it holds, in any state.

        While reads may still write into its pages these are quarantined, and the window stays taken,
        until `on_receive_ended`. A leased context's pages stay until `on_lease_ended`.
        """
        is_receiving = request.state is AttemptState.DISAGG_GENERATION_TRANS_IN_PROGRESS
        is_leased = request.state is AttemptState.DISAGG_CONTEXT_TRANS_IN_PROGRESS
        if is_receiving:
            with self._completing():
                self._manager.quarantine(request)
        elif not is_leased and self._manager.has_cache(request.request_id):
            with self._completing():
                self._manager.free_resources(request)
        request.on_event(event, now_s)
        if is_receiving:
            self._table.move_to_quarantined(request)
        else:
            self._table.leave(request)

    def on_received(self, request_id: RequestId, first_token_id: int, now_s: float) -> Request | None:
        """Activate a verified transfer; None when the attempt ended meanwhile or is unknown."""
        request = self._table.receiving.get(request_id)
        if request is None:
            self._release_quarantine(request_id)
            return None
        with self._completing():
            self._manager.activate_disagg_gen(request)
        self._window.release(request_id)
        # The context side drew it and the door has it (C4): known here, but not a token of this worker.
        request.append_token(first_token_id)
        request.on_event(AttemptEvent.TRANSFER_DONE, now_s)
        request.on_event(AttemptEvent.ACTIVATED, now_s)
        self._table.move_to_generations(request)
        for follower in self._table.take_followers(request):
            assert follower.first_token_id is not None, "an offer brings the first token of each choice"
            follower.append_token(follower.first_token_id)
            self._table.waiting.push(follower)
        return request

    def on_receive_ended(self, request_id: RequestId, now_s: float) -> Request | None:
        """Nothing is written any more and the transfer came to nothing; returns the attempt it failed."""
        request = self._table.receiving.get(request_id)
        if request is None:
            self._release_quarantine(request_id)
            return None
        with self._completing():
            self._manager.free_resources(request)
        self._window.release(request_id)
        request.on_event(AttemptEvent.FAIL, now_s)
        self._table.leave(request)
        return request

    def on_lease_ended(self, lease_id: LeaseId, now_s: float, *, settled: bool) -> Request | None:
        """Drop a lease's holds; its attempt is complete when settled, failed when expired."""
        request = self._table.leased.get(lease_id)
        if request is None:
            self.counters["late_signals"] += 1
            return None
        with self._completing():
            self._manager.end_lease(lease_id)
        del self._table.leased[lease_id]
        if not request.is_terminal:
            request.on_event(AttemptEvent.LEASE_SETTLED if settled else AttemptEvent.FAIL, now_s)
            self._table.leave(request)
        return request

    def lease_part(self, request: Request, num_tokens: int) -> PageLease:
        """Hold full blocks of a context that goes on; ends by `end_part`."""
        with self._completing():
            lease = self._manager.grant_lease(request, num_tokens)
        self._table.parts.add(lease.lease_id)
        return lease

    def end_part(self, lease_id: LeaseId) -> None:
        """Drop a part's holds."""
        with self._completing():
            self._manager.end_lease(lease_id)
        self._table.parts.discard(lease_id)

    def _release_quarantine(self, request_id: RequestId) -> None:
        if request_id not in self._table.quarantined:
            self.counters["late_signals"] += 1
            return
        with self._completing():
            self._manager.release_quarantine(request_id)
        self._window.release(request_id)
        del self._table.quarantined[request_id]

    def _completing(self) -> TransactionScope:
        return TransactionScope(self._manager.begin_complete())
