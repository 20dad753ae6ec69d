"""The worker decides that a token is the last one."""

from collections.abc import Sequence

import pytest

from scheduler.request import Request
from scheduler.spec import AttemptId, DoorName, FinishReason, RequestSpec, RequestUid, SamplingParams, StopParams
from scheduler.states import AttemptState
from serving.workers.stop_checker import StopChecker

_EOS = 2


class _WordDetector:
    """A token is a letter; finds a stop string in what was pushed."""

    def __init__(self, stop_strings: Sequence[str], min_tokens: int) -> None:
        assert min_tokens == 0
        self._stop_strings = stop_strings
        self._text = ""

    def push(self, token_id: int) -> bool:
        self._text += chr(token_id)
        return any(stop in self._text for stop in self._stop_strings)


def _request(stop: StopParams, accepted: tuple[int, ...] = ()) -> Request:
    spec = RequestSpec(RequestUid("r"), DoorName("d"), (5, 6), SamplingParams(), stop, accepted_token_ids=accepted)
    return Request(spec, AttemptId("1.1"), AttemptState.CONTEXT_INIT, arrival=0, now_s=0.0)


@pytest.fixture
def checker() -> StopChecker:
    return StopChecker([_EOS], _WordDetector)


def test_the_end_of_sequence_token_stops_unless_it_is_ignored(checker: StopChecker) -> None:
    assert checker.check(_request(StopParams(max_tokens=9)), _EOS) is FinishReason.STOP
    assert checker.check(_request(StopParams(max_tokens=9, ignore_eos=True)), _EOS) is None


def test_a_stop_token_stops_even_when_end_of_sequence_is_ignored(checker: StopChecker) -> None:
    stop = StopParams(max_tokens=9, stop_token_ids=(_EOS,), ignore_eos=True)
    assert checker.check(_request(stop), _EOS) is FinishReason.STOP


def test_the_length_counts_tokens_of_earlier_attempts(checker: StopChecker) -> None:
    assert checker.check(_request(StopParams(max_tokens=3), accepted=(7,)), 8) is None
    assert checker.check(_request(StopParams(max_tokens=3), accepted=(7, 8)), 9) is FinishReason.LENGTH


def test_a_stop_string_that_began_in_an_earlier_attempt_is_found(checker: StopChecker) -> None:
    request = _request(StopParams(max_tokens=9, stop_strings=("ab",)), accepted=(ord("a"),))
    assert checker.check(request, ord("b")) is FinishReason.STOP


def test_a_stop_string_wins_over_the_length(checker: StopChecker) -> None:
    request = _request(StopParams(max_tokens=1, stop_strings=("x",)))
    assert checker.check(request, ord("x")) is FinishReason.STOP


def test_a_forgotten_attempt_starts_again_from_its_tokens(checker: StopChecker) -> None:
    request = _request(StopParams(max_tokens=9, stop_strings=("ab",)))
    assert checker.check(request, ord("a")) is None
    checker.forget(request.attempt_id)
    assert checker.check(request, ord("b")) is None
