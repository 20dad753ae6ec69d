"""`RequestTable`: every attempt that has not ended on this worker, in exactly one place each.

    waiting      CONTEXT_INIT, holds nothing, never started here
    contexts     CONTEXT_INIT, started: between chunks, or paused for recompute
    offers       DISAGG_GENERATION_INIT, holds nothing
    receiving    DISAGG_GENERATION_TRANS_IN_PROGRESS, a reservation
    generations  GENERATION_IN_PROGRESS, or GENERATION_PAUSED with a suspended cache
    followers    CONTEXT_INIT, by the request whose prefill they share: they draw their first token from its logits,
                 or have it and wait for the transfer
    leased       DISAGG_CONTEXT_TRANS_IN_PROGRESS, pages held for a remote reader

Beside them: pages that outlive their attempt, `quarantined` (reads may still write into them) and the
leases of cancelled contexts. Refuses to know the manager: the callers move pages and places together.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from manager import LeaseId, RequestId
from scheduler.output import ContextChunk
from scheduler.policy import Ordering
from scheduler.request import Request
from scheduler.spec import AttemptId
from scheduler.waiting_queue import WaitingQueue


@dataclass(frozen=True, slots=True)
class Offer:
    """An invitation to generate here.

    Attributes:
        transfer_bytes: what its ticket would add to the window; None while its context is not computed.
    """

    request: Request
    transfer_bytes: int | None


class RequestTable:
    """Where each attempt is. The dictionaries keep the order of entry, which is the order of arrival."""

    __slots__ = (
        "_by_id",
        "_generation_line",
        "contexts",
        "followers",
        "generations",
        "leased",
        "offers",
        "ordering",
        "parts",
        "quarantined",
        "receiving",
        "waiting",
    )

    def __init__(self, ordering: Ordering) -> None:
        """An empty table."""
        self.ordering = ordering
        self.waiting = WaitingQueue(ordering.rank)
        self.contexts: dict[RequestId, Request] = {}
        self.offers: dict[RequestId, Offer] = {}
        self.receiving: dict[RequestId, Request] = {}
        self.generations: dict[RequestId, Request] = {}
        self.followers: dict[RequestId, list[Request]] = {}
        self.leased: dict[LeaseId, Request] = {}
        self.parts: set[LeaseId] = set()
        """Leases of what contexts that go on have filled so far."""
        self.quarantined: dict[RequestId, Request] = {}
        self._by_id: dict[RequestId, Request] = {}
        self._generation_line: list[Request] | None = None

    def enter(self, request: Request) -> None:
        """Make it known; the caller puts it into its place."""
        self._by_id[request.request_id] = request

    def get(self, attempt_id: AttemptId) -> Request | None:
        """A request that has not ended."""
        return self._by_id.get(RequestId(attempt_id))

    def leave(self, request: Request) -> None:
        """It has ended: out of its place and unknown from now on. Leases and quarantine stay."""
        request_id = request.request_id
        self._by_id.pop(request_id, None)
        self.waiting.discard(request_id)
        for place in (self.contexts, self.receiving, self.generations):
            place.pop(request_id, None)
        self._generation_line = None
        self.offers.pop(request_id, None)
        self._leave_group(request)

    def follow(self, leader: Request, followers: Sequence[Request]) -> None:
        """`followers` wait for the leader's context; where it ends before, the first of them takes its place."""
        if followers:
            self.followers[leader.request_id] = list(followers)
            for follower in followers:
                follower.source = leader

    def drawers(self, chunk: ContextChunk) -> list[Request]:
        """Who draws a token from the logits of a chunk: nobody, or its request and those that follow it."""
        if not chunk.is_last:
            return []
        return [chunk.request, *self.followers.get(chunk.request.request_id, ())]

    def is_following(self, request: Request) -> bool:
        """Whether it waits for another's context."""
        return request.source is not None and request in self.followers.get(request.source.request_id, ())

    def take_followers(self, leader: Request) -> list[Request]:
        """They have drawn their first token, and wait from now on for a place of their own."""
        return self.followers.pop(leader.request_id, [])

    def _leave_group(self, request: Request) -> None:
        rest = self.followers.pop(request.request_id, None)
        if rest and rest[0].first_token_id is not None:
            for follower in rest:  # without the transfer there is nothing to share here
                self._by_id.pop(follower.request_id, None)
        elif rest:
            heir = rest.pop(0)
            heir.source = None
            self.waiting.push(heir)
            self.follow(heir, rest)
        elif request.source is not None:
            others = self.followers.get(request.source.request_id, [])
            if request in others:
                others.remove(request)

    def move_to_generations(self, request: Request) -> None:
        """Its context is computed here, or its transfer is verified."""
        self.contexts.pop(request.request_id, None)
        self.receiving.pop(request.request_id, None)
        self.generations[request.request_id] = request
        self._generation_line = None

    def return_to_line(self, requests: Iterable[Request]) -> None:
        """They were looked at and go back to where they stood; the line is as if they had never left."""
        for request in requests:
            self.waiting.push(request)

    def move_to_contexts(self, request: Request) -> None:
        """It left the waiting line, or lost its pages and computes its tokens again."""
        self.generations.pop(request.request_id, None)
        self._generation_line = None
        self.contexts[request.request_id] = request

    def move_to_receiving(self, request: Request) -> None:
        """Its offer became a reservation."""
        self.offers.pop(request.request_id)
        self.receiving[request.request_id] = request

    def move_to_leased(self, request: Request, lease_id: LeaseId) -> None:
        """Its context is computed and held for a reader."""
        self.contexts.pop(request.request_id, None)
        self.leased[lease_id] = request

    def move_to_quarantined(self, request: Request) -> None:
        """It ended while reads may still write into its pages."""
        self.leave(request)
        self.quarantined[request.request_id] = request

    @property
    def num_admitted(self) -> int:
        """Requests that hold pages or are promised to get them back: each will want a seat in a step."""
        return len(self.contexts) + len(self.generations) + len(self.receiving)

    @property
    def has_nothing_to_run(self) -> bool:
        """Whether no request here wants a row, a page or a seat now."""
        return not (self.generations or self.contexts or self.offers or len(self.waiting))

    @property
    def has_pages_in_flight(self) -> bool:
        """Whether pages will come back without any step: a transfer, a lease or a quarantine ends."""
        return bool(self.receiving or self.leased or self.parts or self.quarantined)

    def admitted(self) -> Iterator[Request]:
        """Every request counted by `num_admitted`."""
        yield from self.generations.values()
        yield from self.receiving.values()
        yield from self.contexts.values()

    def generations_in_line(self) -> list[Request]:
        """The generations, first in order first; kept from pass to pass while nobody comes or goes."""
        if self._generation_line is None:
            self._generation_line = self.ordering.first_to_last(self.generations.values())
        return self._generation_line

    def first_context_in_line(self) -> Request | None:
        """Who gets the first chunk: a started context before a new one."""
        if self.contexts:
            return min(self.contexts.values(), key=self.ordering.rank)
        return self.waiting.peek()
