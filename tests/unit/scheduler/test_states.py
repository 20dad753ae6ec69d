"""The state tables: what they allow, and that a refused event changes nothing."""

import itertools

import pytest

from scheduler.errors import IllegalTransition
from scheduler.request import Request
from scheduler.spec import AttemptId, DoorName, RequestSpec, RequestUid, SamplingParams, StopParams
from scheduler.states import (
    ATTEMPT_TRANSITIONS,
    REQUEST_TRANSITIONS,
    TERMINAL_ATTEMPT_STATES,
    TERMINAL_REQUEST_STATES,
    AttemptEvent,
    AttemptState,
    RequestState,
    advance_attempt,
)


def _request(state: AttemptState) -> Request:
    spec = RequestSpec(
        RequestUid("r"),
        DoorName("door"),
        (1, 2, 3),
        SamplingParams(),
        StopParams(max_tokens=4),
        accepted_token_ids=(7,),
    )
    return Request(spec, AttemptId("1.1"), state, arrival=0, now_s=0.0)


def test_every_state_has_a_row() -> None:
    assert set(ATTEMPT_TRANSITIONS) == set(AttemptState)
    assert set(REQUEST_TRANSITIONS) == set(RequestState)


def test_exactly_the_terminal_states_have_no_way_out() -> None:
    assert {state for state, row in ATTEMPT_TRANSITIONS.items() if not row} == TERMINAL_ATTEMPT_STATES
    assert {state for state, row in REQUEST_TRANSITIONS.items() if not row} == TERMINAL_REQUEST_STATES


def test_failing_and_cancelling_are_possible_from_every_state_that_is_not_terminal() -> None:
    for state, row in ATTEMPT_TRANSITIONS.items():
        if state not in TERMINAL_ATTEMPT_STATES:
            assert row[AttemptEvent.FAIL] is AttemptState.FAILED
            assert row[AttemptEvent.CANCEL] is AttemptState.CANCELLED


def test_every_state_is_reachable() -> None:
    reached = {AttemptState.CONTEXT_INIT, AttemptState.DISAGG_GENERATION_INIT}
    for _ in AttemptState:
        reached |= set(itertools.chain.from_iterable(ATTEMPT_TRANSITIONS[state].values() for state in reached))
    assert reached == set(AttemptState)


@pytest.mark.parametrize(("state", "event"), list(itertools.product(AttemptState, AttemptEvent)))
def test_an_event_that_the_table_lacks_raises_and_changes_nothing(state: AttemptState, event: AttemptEvent) -> None:
    request = _request(state)
    if event in ATTEMPT_TRANSITIONS[state]:
        request.on_event(event, 1.0)
        assert request.state is advance_attempt(state, event)
        # Tokens are in `token_ids`; a history of each of them would only repeat it.
        noted = [] if event is AttemptEvent.TOKEN else [event]
        assert [change.event for change in request.history] == noted
    else:
        with pytest.raises(IllegalTransition):
            request.on_event(event, 1.0)
        assert request.state is state
        assert request.history == []


def test_accepted_tokens_are_computed_like_prompt_but_counted_as_generated() -> None:
    request = _request(AttemptState.CONTEXT_INIT)
    assert request.prompt_length == 4
    assert request.num_generated == 1
    assert request.append_token(9) == 1
    assert list(request.token_ids) == [1, 2, 3, 7, 9]
