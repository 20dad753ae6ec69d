"""The table of session states."""

import itertools

import pytest

from kvtransfer.errors import TransferLogicError
from kvtransfer.states import (
    SESSION_TRANSITIONS,
    TERMINAL_SESSION_STATES,
    SessionEvent,
    SessionState,
    advance_session,
)


def test_every_state_has_a_row_and_terminal_states_are_those_without_events() -> None:
    assert set(SESSION_TRANSITIONS) == set(SessionState)
    assert {state for state, row in SESSION_TRANSITIONS.items() if not row} == TERMINAL_SESSION_STATES


@pytest.mark.parametrize(("state", "event"), list(itertools.product(SessionState, SessionEvent)))
def test_an_event_outside_the_table_raises(state: SessionState, event: SessionEvent) -> None:
    row = SESSION_TRANSITIONS[state]
    if event in row:
        assert advance_session(state, event) is row[event]
    else:
        with pytest.raises(TransferLogicError, match=f"{state} cannot take event {event}"):
            advance_session(state, event)


def test_failure_and_cancel_are_possible_from_every_state_that_has_not_ended() -> None:
    for state in set(SessionState) - TERMINAL_SESSION_STATES:
        assert advance_session(state, SessionEvent.FAIL) is SessionState.ERROR
        assert advance_session(state, SessionEvent.CANCEL) is SessionState.CANCELLED


def test_the_only_way_to_trusted_pages_is_through_all_bytes_and_the_owners_answer() -> None:
    ways = [
        (state, event)
        for state, row in SESSION_TRANSITIONS.items()
        for event, successor in row.items()
        if successor is SessionState.FULLY_TRANSFERRED
    ]
    assert ways == [(SessionState.KV_TRANSFERRED, SessionEvent.SETTLED)]
