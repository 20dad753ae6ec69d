"""The door's truth about one token stream."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.messages import TokenEvent
from scheduler.spec import AttemptId, DoorName, FinishReason, RequestSpec, RequestUid, SamplingParams, StopParams
from serving.output_text import OutputText
from serving.stream import Arrival, ChoiceStream
from serving.tokenizer import Tokenizer
from tests.fakes.tiny_tokenizer import EOS_TOKEN_ID, make_tokenizer_folder

UID = RequestUid("cmpl-1/0")
FIRST, SECOND = AttemptId("1.1"), AttemptId("1.2")


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.load(make_tokenizer_folder(Path(mkdtemp())))


def make_stream(*stop_strings: str, max_tokens: int = 8, stop_token_ids: tuple[int, ...] = ()) -> ChoiceStream:
    stop = StopParams(max_tokens=max_tokens, stop_strings=stop_strings, stop_token_ids=stop_token_ids)
    spec = RequestSpec(UID, DoorName("door"), (1, 2, 3), SamplingParams(seed=7), stop)
    return ChoiceStream(spec, 0, OutputText(tokenizer().token_bytes, stop_strings), frozenset({EOS_TOKEN_ID}))


def event(
    position: int, token_id: int = 50, attempt: AttemptId = FIRST, reason: FinishReason | None = None
) -> TokenEvent:
    return TokenEvent(UID, attempt, position, token_id, reason)


def text_of(stream: ChoiceStream) -> str:
    delta = stream.take_delta()
    return delta.text if delta else ""


def test_only_the_next_position_is_accepted() -> None:
    stream = make_stream()
    assert stream.receive(event(0)) is Arrival.ACCEPTED
    assert stream.receive(event(0)) is Arrival.REPEATED
    assert stream.receive(event(0, token_id=51)) is Arrival.DIVERGED
    assert stream.receive(event(2)) is Arrival.HELD
    assert stream.receive(event(2)) is Arrival.REPEATED
    assert stream.receive(event(-1)) is Arrival.OUT_OF_RANGE
    assert stream.receive(event(8)) is Arrival.OUT_OF_RANGE
    assert (stream.token_ids, stream.has_gap) == ([50], True)
    assert stream.receive(event(1)) is Arrival.ACCEPTED
    assert (stream.token_ids, stream.has_gap) == ([50, 50, 50], False)


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(st.permutations(range(8)), st.lists(st.integers(0, 7), max_size=10))
def test_any_order_and_any_repeats_give_the_same_stream(order: list[int], repeats: list[int]) -> None:
    tokens = tokenizer().encode("Once upon a time there was a river")[:8]
    events = [event(p, tokens[p], reason=FinishReason.LENGTH if p == 7 else None) for p in [*order, *repeats]]
    stream = make_stream()
    text = ""
    for each in events:
        stream.receive(each)
        text += text_of(stream)
    assert stream.token_ids == tokens
    assert text == tokenizer().decode(tokens)
    assert (stream.finish_reason, stream.is_confirmed_end) == (FinishReason.LENGTH, True)


def test_nothing_is_accepted_after_the_end() -> None:
    stream = make_stream()
    stream.receive(event(0, reason=FinishReason.STOP))
    assert stream.receive(event(1)) is Arrival.OUT_OF_RANGE
    assert stream.token_ids == [50]


def test_the_text_of_a_stop_token_is_left_out_but_that_of_an_ordinary_last_token_is_not() -> None:
    word = tokenizer().encode("river")
    for reason, stops, expected in (
        (FinishReason.STOP, tuple(word), ""),
        (FinishReason.LENGTH, tuple(word), tokenizer().decode(word[:1])),
        (FinishReason.STOP, (), tokenizer().decode(word[:1])),
    ):
        stream = make_stream(stop_token_ids=stops)
        stream.receive(event(0, word[0], reason=reason))
        assert (text_of(stream), stream.token_ids) == (expected, word[:1])


def test_a_worker_that_misses_a_stop_string_or_the_length_does_not_lengthen_the_stream() -> None:
    stream = make_stream("r")
    for position, token in enumerate(tokenizer().encode("Once upon a time there")[:8]):
        if not stream.is_finished:
            stream.receive(event(position, token))
    assert (stream.finish_reason, stream.is_confirmed_end) == (FinishReason.STOP, False)
    assert "r" not in text_of(stream)
    stream = make_stream(max_tokens=2)
    stream.receive(event(0))
    stream.receive(event(1))
    assert (stream.finish_reason, stream.is_confirmed_end) == (FinishReason.LENGTH, False)


def test_what_was_held_back_comes_with_the_end() -> None:
    stream = make_stream("river bank")
    ids = tokenizer().encode("river ban")
    for position, token in enumerate(ids):
        stream.receive(event(position, token, reason=FinishReason.LENGTH if position == len(ids) - 1 else None))
    assert text_of(stream) == "river ban"


def test_a_continuation_has_the_accepted_tokens_and_changes_nothing_else() -> None:
    stream = make_stream()
    for position in (0, 1, 3):
        stream.receive(event(position, 60 + position))
    spec = stream.continuation()
    assert spec == replace(stream.spec, accepted_token_ids=(60, 61), is_continuation=True)
    assert stream.has_gap, "asking for a continuation must not forget what a living attempt sent"


def test_giving_up_forgets_what_came_ahead_and_does_not_trust_the_lost_attempts_end() -> None:
    stream = make_stream()
    stream.receive(event(0))
    stream.receive(event(2))
    stream.give_up_attempts()
    assert not stream.has_gap
    stream.receive(event(1, reason=FinishReason.STOP))
    assert (stream.is_finished, stream.is_confirmed_end) == (True, False)

    stream = make_stream()
    stream.receive(event(0))
    stream.give_up_attempts()
    stream.receive(event(1, attempt=SECOND, reason=FinishReason.STOP))
    assert stream.is_confirmed_end


def test_a_stream_of_no_tokens_is_finished_from_the_start() -> None:
    stream = make_stream(max_tokens=0)
    delta = stream.take_delta()
    assert delta is not None
    assert (delta.text, delta.finish_reason) == ("", FinishReason.LENGTH)
    assert stream.take_delta() is None
    assert stream.receive(event(0)) is Arrival.OUT_OF_RANGE
