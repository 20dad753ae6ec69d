"""The life of an attempt and of a request: every state, every event, and the only code that moves one.

Refuses to know what causes an event. `advance` is the single place where a state changes; an event
that the table lacks raises `IllegalTransition` and leaves the state as it was. `scripts/diagrams.py`
renders both tables into ARCHITECTURE.md, so the picture cannot lie.

Source: the form follows h11's `_state.py` (table first, code second); the state names are TensorRT-LLM's.
"""

from collections.abc import Mapping
from enum import StrEnum

from scheduler.errors import IllegalTransition


class AttemptState(StrEnum):
    """Where one attempt is on one worker."""

    CONTEXT_INIT = "context_init"
    DISAGG_CONTEXT_TRANS_IN_PROGRESS = "disagg_context_trans_in_progress"
    DISAGG_CONTEXT_COMPLETE = "disagg_context_complete"
    DISAGG_GENERATION_INIT = "disagg_generation_init"
    DISAGG_GENERATION_TRANS_IN_PROGRESS = "disagg_generation_trans_in_progress"
    DISAGG_GENERATION_TRANS_COMPLETE = "disagg_generation_trans_complete"
    GENERATION_IN_PROGRESS = "generation_in_progress"
    GENERATION_PAUSED = "generation_paused"
    GENERATION_COMPLETE = "generation_complete"
    FAILED = "failed"
    CANCELLED = "cancelled"


class AttemptEvent(StrEnum):
    """What can happen to one attempt on one worker."""

    CHUNK_DONE = "chunk_done"
    CONTEXT_LEASED = "context_leased"
    CONTEXT_SHARED = "context_shared"
    CONTEXT_DONE_HERE = "context_done_here"
    FINISHED_BY_FIRST_TOKEN = "finished_by_first_token"
    LEASE_SETTLED = "lease_settled"
    DEFERRED = "deferred"
    RESERVED = "reserved"
    TRANSFER_DONE = "transfer_done"
    ACTIVATED = "activated"
    TOKEN = "token"
    SUSPENDED = "suspended"
    RESUMED = "resumed"
    RECOMPUTE = "recompute"
    FINISHED = "finished"
    FAIL = "fail"
    CANCEL = "cancel"


class RequestState(StrEnum):
    """Where a whole request is, as the central scheduler sees it."""

    QUEUED = "queued"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"


class RequestEvent(StrEnum):
    """What can happen to a whole request."""

    DISPATCHED = "dispatched"
    ATTEMPT_LOST = "attempt_lost"
    FINISHED = "finished"
    FAIL = "fail"
    CANCEL = "cancel"


TERMINAL_ATTEMPT_STATES = frozenset(
    {
        AttemptState.DISAGG_CONTEXT_COMPLETE,
        AttemptState.GENERATION_COMPLETE,
        AttemptState.FAILED,
        AttemptState.CANCELLED,
    }
)
TERMINAL_REQUEST_STATES = frozenset({RequestState.COMPLETED, RequestState.FAILED, RequestState.CANCELLED})

_S, _E = AttemptState, AttemptEvent
_ENDINGS = {_E.FAIL: _S.FAILED, _E.CANCEL: _S.CANCELLED}

ATTEMPT_TRANSITIONS: Mapping[AttemptState, Mapping[AttemptEvent, AttemptState]] = {
    _S.CONTEXT_INIT: {
        _E.CHUNK_DONE: _S.CONTEXT_INIT,
        _E.CONTEXT_LEASED: _S.DISAGG_CONTEXT_TRANS_IN_PROGRESS,
        # Its first token travels with the ticket of another choice of the same prompt.
        _E.CONTEXT_SHARED: _S.DISAGG_CONTEXT_COMPLETE,
        _E.CONTEXT_DONE_HERE: _S.GENERATION_IN_PROGRESS,
        # On a context worker, a first token that ends the request: no ticket, nothing is transferred.
        _E.FINISHED_BY_FIRST_TOKEN: _S.DISAGG_CONTEXT_COMPLETE,
        _E.FINISHED: _S.GENERATION_COMPLETE,
        **_ENDINGS,
    },
    _S.DISAGG_CONTEXT_TRANS_IN_PROGRESS: {_E.LEASE_SETTLED: _S.DISAGG_CONTEXT_COMPLETE, **_ENDINGS},
    _S.DISAGG_CONTEXT_COMPLETE: {},
    _S.DISAGG_GENERATION_INIT: {
        _E.DEFERRED: _S.DISAGG_GENERATION_INIT,
        _E.RESERVED: _S.DISAGG_GENERATION_TRANS_IN_PROGRESS,
        **_ENDINGS,
    },
    _S.DISAGG_GENERATION_TRANS_IN_PROGRESS: {
        _E.TRANSFER_DONE: _S.DISAGG_GENERATION_TRANS_COMPLETE,
        **_ENDINGS,
    },
    _S.DISAGG_GENERATION_TRANS_COMPLETE: {_E.ACTIVATED: _S.GENERATION_IN_PROGRESS, **_ENDINGS},
    _S.GENERATION_IN_PROGRESS: {
        _E.TOKEN: _S.GENERATION_IN_PROGRESS,
        _E.SUSPENDED: _S.GENERATION_PAUSED,
        _E.FINISHED: _S.GENERATION_COMPLETE,
        **_ENDINGS,
    },
    _S.GENERATION_PAUSED: {
        _E.RESUMED: _S.GENERATION_IN_PROGRESS,
        _E.RECOMPUTE: _S.CONTEXT_INIT,
        **_ENDINGS,
    },
    _S.GENERATION_COMPLETE: {},
    _S.FAILED: {},
    _S.CANCELLED: {},
}

_R, _RE = RequestState, RequestEvent
REQUEST_TRANSITIONS: Mapping[RequestState, Mapping[RequestEvent, RequestState]] = {
    _R.QUEUED: {_RE.DISPATCHED: _R.RUNNING, _RE.FAIL: _R.FAILED, _RE.CANCEL: _R.CANCELLED},
    _R.RUNNING: {
        _RE.ATTEMPT_LOST: _R.QUEUED,
        _RE.FINISHED: _R.COMPLETED,
        _RE.FAIL: _R.FAILED,
        _RE.CANCEL: _R.CANCELLED,
    },
    _R.COMPLETED: {},
    _R.FAILED: {},
    _R.CANCELLED: {},
}


def advance_attempt(state: AttemptState, event: AttemptEvent) -> AttemptState:
    """The state after `event`. Raises IllegalTransition where the table has none."""
    try:
        return ATTEMPT_TRANSITIONS[state][event]
    except KeyError:
        msg = f"attempt in {state} cannot take event {event}"
        raise IllegalTransition(msg) from None


def advance_request(state: RequestState, event: RequestEvent) -> RequestState:
    """The state after `event`. Raises IllegalTransition where the table has none."""
    try:
        return REQUEST_TRANSITIONS[state][event]
    except KeyError:
        msg = f"request in {state} cannot take event {event}"
        raise IllegalTransition(msg) from None
