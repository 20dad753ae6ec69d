"""Choices of one prompt at the cluster level: one context for all that wait together, one offer, one transfer.

A group exists from a dispatch to an activation and is nobody's property: the context worker says who carries the
ticket, and a choice that is lost goes on as a request of its own.
"""

from manager import WorkerName
from scheduler.central_books import CentralBooks
from scheduler.central_endings import Endings, Fault
from scheduler.introductions import HoldingKind
from scheduler.messages import ErrorKind, Handoff
from scheduler.router import WorkerLoad
from scheduler.spec import AttemptId, Follower
from scheduler.states import RequestState
from scheduler.tracked_request import Phase, TrackedRequest


def take_sharers(
    books: CentralBooks, leader: TrackedRequest, worker: WorkerName, kind: HoldingKind
) -> tuple[list[TrackedRequest], tuple[Follower, ...]]:
    """Choices of the leader's prompt that wait for a context as it does; they wait no longer.

    Returns:
        Those choices, and the attempts that the leader's command to `worker` brings along.
    """
    spec = leader.spec
    if not books.config.share_choices or not _can_share(leader):
        return [], ()
    sharers = [
        other
        for other in books.groups.get(spec.group, ())
        if other is not leader and _can_share(other) and other.spec.prompt_token_ids == spec.prompt_token_ids
    ]
    for other in sharers:
        books.contexts.discard(other.key)
    books.counters["shared_contexts"] += len(sharers)
    return sharers, tuple([_give_share(books, worker, sharer, kind) for sharer in sharers])


def _can_share(request: TrackedRequest) -> bool:
    is_waiting = request.state is RequestState.QUEUED and request.phase is Phase.WAITING_CONTEXT
    return is_waiting and bool(request.spec.group) and not request.spec.is_continuation


def _give_share(books: CentralBooks, worker: WorkerName, sharer: TrackedRequest, kind: HoldingKind) -> Follower:
    """Begin an attempt that the next command to `worker` brings along."""
    attempt_id = books.ensure_attempt(sharer)
    if kind is HoldingKind.LOCAL:
        sharer.enter(Phase.LOCAL)
        sharer.generation_worker = worker
    else:
        sharer.enter(Phase.CONTEXT)
        sharer.context_worker = worker
    return Follower(attempt_id, sharer.spec)


def on_context_shared(
    books: CentralBooks, endings: Endings, request: TrackedRequest, handoff: Handoff, carrier: AttemptId, now_s: float
) -> None:
    """Its first token is drawn and its prompt is in the carrier's lease: it follows the carrier from here."""
    if request.context_worker is not None and request.attempt_id is not None:
        books.ledger.release(request.context_worker, request.attempt_id)
    request.context_worker = None
    request.handoff = handoff
    leader = books.attempts.get(carrier)
    if leader is None or leader.phase is not Phase.WAITING_OFFER:
        message = f"request {request.spec.uid}: the choice that carried its prompt has ended"
        endings.lose_attempt(request, Fault(ErrorKind.TRANSFER, message, is_retriable=True), now_s)
        return
    request.enter(Phase.FOLLOWING)
    request.leader = leader
    leader.followers.append(request)


def on_group_activated(
    books: CentralBooks,
    worker: WorkerName,
    leader: TrackedRequest | None,
    followers: tuple[AttemptId, ...],
    now_s: float,
) -> None:
    """The followers run on `worker`, each by itself; those that nobody wants any more are cancelled there."""
    wanted = {} if leader is None else {follower.attempt_id: follower for follower in leader.followers}
    if leader is not None:
        leader.followers = []
    for attempt_id in followers:
        follower = wanted.get(attempt_id)
        if follower is None:
            running = books.attempts.get(attempt_id)
            if running is None or running.generation_worker != worker:
                books.cancel(worker, attempt_id, now_s)
            continue
        follower.leader = None
        follower.enter(Phase.GENERATION)
        follower.generation_worker = worker
        books.hold(WorkerLoad(worker), follower, HoldingKind.GENERATION, 0, now_s)
        books.counters["shared_transfers"] += 1
