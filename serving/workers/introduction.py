"""What a worker tells a central scheduler that does not know it: every attempt that it holds, with its ticket (C6).

Made on the loop's thread between two iterations, so that it is exact: it contains the effects of every
report sent before it, and of none sent after.
"""

from collections.abc import Callable

from scheduler.interface import IterationScheduler
from scheduler.introductions import AttemptPart, HoldingKind, WorkerIntroduction
from scheduler.messages import Handoff, WorkerRole
from scheduler.request import Request
from scheduler.spec import AttemptId
from scheduler.states import AttemptState
from scheduler.tracked_request import total_tokens

IntroductionSink = Callable[[WorkerIntroduction], None]
"""Takes an introduction to the central scheduler that asked for it; returns at once."""

_KINDS = {
    AttemptState.DISAGG_CONTEXT_TRANS_IN_PROGRESS: HoldingKind.LEASE,
    AttemptState.DISAGG_GENERATION_INIT: HoldingKind.OFFER,
    AttemptState.DISAGG_GENERATION_TRANS_IN_PROGRESS: HoldingKind.TRANSFER,
    AttemptState.DISAGG_GENERATION_TRANS_COMPLETE: HoldingKind.TRANSFER,
}


def held_parts(
    scheduler: IterationScheduler,
    role: WorkerRole,
    leased: tuple[AttemptId, ...],
    handoff_of: Callable[[AttemptId], Handoff | None],
) -> tuple[AttemptPart, ...]:
    """Everything that has not ended on this worker.

    Args:
        scheduler: the worker's.
        role: the worker's.
        leased: contexts that wait for their reader; a scheduler need not list them as running.
        handoff_of: the ticket that was given or received for an attempt.
    """
    attempts: dict[AttemptId, Request] = {}
    for request in (*scheduler.running, *scheduler.waiting):
        attempts[request.attempt_id] = request
    for attempt_id in leased:
        leased_request = scheduler.get(attempt_id)
        if leased_request is not None:
            attempts[attempt_id] = leased_request
    return tuple(_part(request, role, handoff_of(attempt_id)) for attempt_id, request in attempts.items())


def _part(request: Request, role: WorkerRole, handoff: Handoff | None) -> AttemptPart:
    kind = _KINDS.get(request.state)
    if kind is None:  # it computes: here alone, or one of the two halves
        kind = HoldingKind.CONTEXT if role is WorkerRole.CONTEXT else HoldingKind.LOCAL
    num_tokens = request.prompt_length if role is WorkerRole.CONTEXT else total_tokens(request.spec)
    return AttemptPart(request.attempt_id, request.spec.uid, kind, num_tokens, handoff)
