"""Takes offers in the order of their arrival, or defers them: the init half of the handoff (C1)."""

from itertools import chain

from manager import Grant, PoolGroupId, Refusal, RefusalReason
from scheduler.admission import TransferWindow
from scheduler.iteration_pass import IterationPass
from scheduler.output import OLDER_REQUEST_WAITS, Deferral
from scheduler.policy import PageReckoning
from scheduler.request import Request, WithDrafts
from scheduler.request_table import Offer, RequestTable


class OfferPlanner:
    """The second part of a pass: outside the row budget, inside the page budget (S1)."""

    __slots__ = ("_max_requests", "_plan", "_reckoning", "_set_aside", "_table", "_window")

    def __init__(
        self,
        plan: IterationPass,
        table: RequestTable,
        reckoning: PageReckoning,
        window: TransferWindow,
        max_requests: int,
    ) -> None:
        """Made for one pass; reads the table and changes nothing in it."""
        self._plan = plan
        self._table = table
        self._reckoning = reckoning
        self._window = window
        self._max_requests = max_requests
        self._set_aside: dict[PoolGroupId, int] | None = None

    def run(self, starved: Request | None) -> None:
        """Decide every offer: reserved, deferred or failed.

        The first deferral defers all later ones, so that admission follows arrival (C2).

        Args:
            starved: the context first in line, when the pass before had no chunk for any; no later
                offer is taken while it waits (S5).
        """
        decisions = self._plan.decisions
        closed: Deferral | None = None
        for offer in self._table.offers.values():
            if closed is None:
                closed = self._deferral_before_trying(offer, starved) or self._reserve(offer)
                if closed is not None:
                    decisions.deferred.append((offer.request, closed))
            else:
                decisions.deferred.append((offer.request, Deferral(OLDER_REQUEST_WAITS)))

    def _deferral_before_trying(self, offer: Offer, starved: Request | None) -> Deferral | None:
        blocked_by = self._plan.decisions.blocked_by
        if blocked_by is not None:
            return Deferral(OLDER_REQUEST_WAITS, blocked_by.needed, blocked_by.available)
        if self._plan.decisions.pushed_out or self._has_paused_contexts():
            return Deferral(OLDER_REQUEST_WAITS)
        if starved is not None and not starved.is_terminal and starved.arrival < offer.request.arrival:
            return Deferral(OLDER_REQUEST_WAITS)
        admitted = self._table.num_admitted + len(self._plan.decisions.reserved)
        if admitted >= self._max_requests:
            return Deferral("batch_full", 1, self._max_requests - admitted)
        others = chain(self._table.admitted(), self._plan.decisions.reserved)
        if not self._reckoning.fits_worst_case(others, offer.request, context_only=False):
            return Deferral("worst_case_exceeds_pool")
        return None

    def _has_paused_contexts(self) -> bool:
        """Whether anybody who lost its pages waits to start again: room is theirs first (B15)."""
        return any(not self._plan.is_active(request) for request in self._table.contexts.values())

    def _reserve(self, offer: Offer) -> Deferral | None:
        """Take pages, growth and window in one attempt; a refusal by any leaves nothing of the others."""
        plan, request = self._plan, offer.request
        mark = plan.mark()
        answer = plan.manager.prepare_disagg_gen_init(request)
        if isinstance(answer, Refusal) and answer.reason is RefusalReason.NEVER_FITS and request.num_draft_tokens:
            # It runs here without drafts; only with them it is larger than the pool.
            answer = plan.manager.prepare_disagg_gen_init(WithDrafts(request, 0))
        if isinstance(answer, Refusal):
            if answer.reason is RefusalReason.NEVER_FITS:
                plan.fail(request, answer)
                return None
            return Deferral(answer.reason.value, answer.needed, answer.available)
        deferral = self._deferral_after_grant(offer, answer)
        if deferral is not None:
            plan.return_to(mark)
            return deferral
        plan.decisions.reserved.append(request)
        return None

    def _deferral_after_grant(self, offer: Offer, grant: Grant) -> Deferral | None:
        plan = self._plan
        plan.budget.commit(grant)
        reserve = self._reserve_with(offer.request)
        for group, pages in reserve.items():
            if pages > plan.budget.pages[group]:
                return Deferral("growth_reserve", pages, plan.budget.pages[group])
        num_bytes = self._transfer_bytes(offer)
        if not self._window.try_take(offer.request.request_id, num_bytes):
            return Deferral("transfer_window", num_bytes, self._window.available_bytes)
        self._set_aside = reserve
        return None

    def _transfer_bytes(self, offer: Offer) -> int:
        """Without a ticket, what its pages will take: a place reserved first is in the window as well (C1b)."""
        if offer.transfer_bytes is not None:
            return offer.transfer_bytes
        return self._reckoning.num_bytes(self._plan.manager.pages_to_fill(offer.request.request_id))

    def _reserve_with(self, newcomer: Request) -> dict[PoolGroupId, int]:
        """A block for each that grows, the newcomer included; who decodes is settled before the first offer."""
        if self._set_aside is None:
            growing = chain(self._plan.decisions.decoding(), self._table.receiving.values())
            self._set_aside = self._reckoning.growth(growing)
        own = self._reckoning.growth((newcomer, *self._followers_to_seat(newcomer)))
        return {group: pages + own[group] for group, pages in self._set_aside.items()}

    def _followers_to_seat(self, newcomer: Request) -> list[Request]:
        """Each choice that comes with it needs a copy of the block where the prompt ends, and one to grow into.

        Where nobody else is here, waiting would bring no more room: those that fit start, the others follow.
        """
        if not (self._table.num_admitted or self._plan.decisions.reserved):
            return []
        return self._table.followers.get(newcomer.request_id, []) * 2
