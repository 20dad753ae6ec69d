"""The life of one receive: every state, every event, and the only code that moves one.

Refuses to know what causes an event. `advance_session` is the single place where a state changes; an
event that the table lacks raises `TransferLogicError` and leaves the state as it was.
`scripts/diagrams.py` can render the table, so a picture of it cannot lie.

Source: the form follows h11's `_state.py` (table first, code second); the state names are TensorRT-LLM's.
"""

from collections.abc import Mapping
from enum import StrEnum

from kvtransfer.errors import TransferLogicError


class SessionState(StrEnum):
    """Where one receive is."""

    INIT = "init"
    READY = "ready"
    """Compatible and planned; no byte has moved."""
    TRANSFERRING = "transferring"
    """The transport may be writing into our pages."""
    KV_TRANSFERRED = "kv_transferred"
    """Every byte is here and none is trusted: the owner has not answered yet."""
    FULLY_TRANSFERRED = "fully_transferred"
    ERROR = "error"
    CANCELLED = "cancelled"


class SessionEvent(StrEnum):
    """What can happen to one receive."""

    PLANNED = "planned"
    READ_STARTED = "read_started"
    NOTHING_TO_READ = "nothing_to_read"
    READ_DONE = "read_done"
    SETTLED = "settled"
    FAIL = "fail"
    """Broken, refused or expired. From TRANSFERRING only once the transport has stopped writing."""
    CANCEL = "cancel"
    """From TRANSFERRING only once the transport has stopped writing."""


TERMINAL_SESSION_STATES = frozenset({SessionState.FULLY_TRANSFERRED, SessionState.ERROR, SessionState.CANCELLED})

_S, _E = SessionState, SessionEvent
_ENDINGS = {_E.FAIL: _S.ERROR, _E.CANCEL: _S.CANCELLED}

SESSION_TRANSITIONS: Mapping[SessionState, Mapping[SessionEvent, SessionState]] = {
    _S.INIT: {_E.PLANNED: _S.READY, **_ENDINGS},
    _S.READY: {_E.READ_STARTED: _S.TRANSFERRING, _E.NOTHING_TO_READ: _S.KV_TRANSFERRED, **_ENDINGS},
    _S.TRANSFERRING: {_E.READ_DONE: _S.KV_TRANSFERRED, **_ENDINGS},
    _S.KV_TRANSFERRED: {_E.SETTLED: _S.FULLY_TRANSFERRED, **_ENDINGS},
    _S.FULLY_TRANSFERRED: {},
    _S.ERROR: {},
    _S.CANCELLED: {},
}


def advance_session(state: SessionState, event: SessionEvent) -> SessionState:
    """The state after `event`. Raises TransferLogicError where the table has none."""
    try:
        return SESSION_TRANSITIONS[state][event]
    except KeyError:
        msg = f"session in {state} cannot take event {event}"
        raise TransferLogicError(msg) from None
