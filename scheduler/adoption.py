"""What becomes of the attempts that a new term finds on its workers (C6).

An attempt whose request a door claims, and whose parts together can still lead to its end, is adopted as
it is: it never notices that the central scheduler changed. Everything else is cancelled, and what a door
claims without such an attempt waits for a fresh one.

    parts found                      adopted as
    LOCAL                            LOCAL
    GENERATION (+ LEASE)             GENERATION; the lease ends by its own settle
    TRANSFER, and a ticket           TRANSFER; the ticket is delivered again where the reader lacks it
    OFFER + LEASE                    OFFERED
    CONTEXT (+ TRANSFER)             CONTEXT; with the reservation when dispatch is generation first
    LEASE                            WAITING_OFFER
    anything else                    nothing: its other half is gone
"""

from collections.abc import Iterable, Mapping, Sequence

from configs import DispatchPolicy
from manager import WorkerName
from scheduler.central_books import CentralBooks
from scheduler.introductions import AttemptPart, HoldingKind
from scheduler.ledger import Holding
from scheduler.messages import DeliverHandoff
from scheduler.spec import AttemptId, RequestUid
from scheduler.takeover import attempt_age
from scheduler.tracked_request import Phase, TrackedRequest

_Parts = Mapping[HoldingKind, tuple[WorkerName, AttemptPart]]


def hold_parts(books: CentralBooks, worker: WorkerName, parts: Iterable[AttemptPart], now_s: float) -> None:
    """Count against a worker what it says it holds."""
    for part in parts:
        books.ledger.add(worker, part.attempt_id, Holding(part.kind, part.num_tokens, 0, now_s))


def cancel_parts(books: CentralBooks, worker: WorkerName, parts: Iterable[AttemptPart], now_s: float) -> None:
    """End what nobody owns."""
    for part in parts:
        books.counters["orphans"] += 1
        books.cancel(worker, part.attempt_id, now_s)


def adopt(books: CentralBooks, found: Sequence[tuple[WorkerName, AttemptPart]], now_s: float) -> None:
    """Give every queued request the newest attempt of it that is whole, and cancel all others.

    Args:
        books: with the claimed requests queued and the parts counted; mutated.
        found: every part of every worker.
        now_s: the caller's clock.
    """
    attempts: dict[AttemptId, dict[HoldingKind, tuple[WorkerName, AttemptPart]]] = {}
    for worker, part in found:
        attempts.setdefault(part.attempt_id, {})[part.kind] = (worker, part)
    adopted: set[RequestUid] = set()
    for attempt_id in sorted(attempts, key=attempt_age, reverse=True):
        parts = attempts[attempt_id]
        uid = next(iter(parts.values()))[1].uid
        request = books.requests.get(uid)
        if request is not None and uid not in adopted and _adopt_one(books, request, attempt_id, parts):
            adopted.add(uid)
            continue
        for worker, part in parts.values():
            cancel_parts(books, worker, [part], now_s)


def _adopt_one(books: CentralBooks, request: TrackedRequest, attempt_id: AttemptId, parts: _Parts) -> bool:
    """Whether the attempt can lead to its end; it is the request's from then on."""
    phase = _phase(parts)
    if phase is None or _breaks_resource_order(books, phase, parts):
        return False
    books.dequeue(request)
    request.context_worker = _worker(parts, HoldingKind.CONTEXT, HoldingKind.LEASE)
    request.generation_worker = _worker(
        parts, HoldingKind.GENERATION, HoldingKind.LOCAL, HoldingKind.TRANSFER, HoldingKind.OFFER
    )
    request.handoff = next((part.handoff for _, part in parts.values() if part.handoff is not None), None)
    request.is_lease_open = HoldingKind.LEASE in parts and phase is not Phase.GENERATION
    books.adopt(request, attempt_id, phase)
    if phase is Phase.WAITING_OFFER:
        books.enqueue(request)
    if phase is Phase.OFFERED and request.generation_worker is not None:
        books.credit.spend(request.generation_worker)
    if phase is Phase.TRANSFER:
        _complete_transfer(books, request, attempt_id, parts)
    return True


def _breaks_resource_order(books: CentralBooks, phase: Phase, parts: _Parts) -> bool:
    """Generation first, a context without its reservation would hold pages and wait for those of its elders (C2)."""
    if books.config.dispatch is not DispatchPolicy.GENERATION_FIRST:
        return False
    is_unreserved = phase is Phase.CONTEXT and HoldingKind.TRANSFER not in parts
    return is_unreserved or phase in {Phase.WAITING_OFFER, Phase.OFFERED}


def _phase(parts: _Parts) -> Phase | None:
    kinds = parts.keys()
    has_ticket = any(part.handoff is not None for _, part in parts.values())
    if HoldingKind.LOCAL in kinds:
        return Phase.LOCAL
    if HoldingKind.GENERATION in kinds:
        return Phase.GENERATION
    if HoldingKind.CONTEXT in kinds:
        return Phase.CONTEXT if HoldingKind.OFFER not in kinds else None
    if HoldingKind.TRANSFER in kinds:
        return Phase.TRANSFER if has_ticket else None
    if HoldingKind.LEASE in kinds:
        return Phase.OFFERED if HoldingKind.OFFER in kinds else Phase.WAITING_OFFER
    return None


def _complete_transfer(books: CentralBooks, request: TrackedRequest, attempt_id: AttemptId, parts: _Parts) -> None:
    reader, part = parts[HoldingKind.TRANSFER]
    if part.handoff is None and request.handoff is not None:
        books.outbox.send(reader, DeliverHandoff(attempt_id, request.handoff))


def _worker(parts: _Parts, *kinds: HoldingKind) -> WorkerName | None:
    return next((parts[kind][0] for kind in kinds if kind in parts), None)
