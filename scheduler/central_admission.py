"""Which submissions are refused, and why (S5, A12, B12): with the value and the limit, before any work.

A request that was begun (the door resubmits it with accepted tokens) was admitted before: it is never
turned away for a full queue or for workers that are being restarted, and waits until its deadline.
"""

from manager import WorkerName
from scheduler.central_books import CentralBooks
from scheduler.messages import DoorNotice, ErrorKind, WorkerRole
from scheduler.spec import RequestSpec
from scheduler.tracked_request import total_tokens


def refusal(books: CentralBooks, spec: RequestSpec, now_s: float) -> DoorNotice | None:
    """Why `spec` cannot be queued now, or None. Changes nothing."""
    if not spec.prompt_token_ids:
        return DoorNotice(spec.uid, ErrorKind.INVALID, f"request {spec.uid}: the prompt has no tokens")
    too_long = _too_long(books, spec)
    if too_long is not None or spec.is_continuation:
        return too_long
    absent = [role for role in books.ledger.missing_roles() if not _is_coming_back(books, role, now_s)]
    if absent:
        message = f"request {spec.uid}: no live {' and no live '.join(absent)} worker"
        return DoorNotice(spec.uid, ErrorKind.NO_WORKER, message)
    limit = books.config.max_queued_requests
    if books.num_queued >= limit:
        message = f"request {spec.uid}: {books.num_queued} requests are queued, the limit is {limit}"
        return DoorNotice(spec.uid, ErrorKind.QUEUE_FULL, message)
    return None


def progress(books: CentralBooks) -> tuple[bool, str]:
    """Whether work can make progress, and why not (I11)."""
    if books.is_taking_over:
        return False, f"term {books.term} is asking workers and doors what runs"
    missing = books.ledger.missing_roles()
    if not missing:
        return True, ""
    lost: dict[WorkerName, str] = {
        record.worker: record.lost_reason for record in books.ledger if record.registration.role in missing
    }
    detail = "".join(f"; {worker} was lost: {reason}" for worker, reason in lost.items())
    return False, f"no live {' and no live '.join(missing)} worker{detail}"


def _too_long(books: CentralBooks, spec: RequestSpec) -> DoorNotice | None:
    for role in books.ledger.needed_roles():
        records = books.ledger.workers(role) or books.ledger.known(role)
        if not records:
            continue
        needed = len(spec.prompt_token_ids) + len(spec.accepted_token_ids)
        if role is not WorkerRole.CONTEXT:
            needed = total_tokens(spec)
        limit = max(record.registration.max_request_tokens for record in records)
        if needed > limit:
            message = f"request {spec.uid} needs {needed} tokens; the largest {role} worker takes {limit}"
            return DoorNotice(spec.uid, ErrorKind.NEVER_FITS, message)
    return None


def _is_coming_back(books: CentralBooks, role: WorkerRole, now_s: float) -> bool:
    """A role that no worker of this young term has yet, or whose last worker is being restarted."""
    grace_s = books.config.restart_grace_s
    if books.is_taking_over or now_s - books.took_over_at_s <= grace_s:
        return True
    return any(now_s - record.lost_at_s <= grace_s for record in books.ledger.known(role))
