"""The text of a stream, and the stop strings in it."""

from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.output_text import IncrementalDecoder, OutputText, StopMatcher, StopStringDetector
from serving.token_bytes import TokenBytes
from serving.tokenizer import Tokenizer
from tests.fakes.tiny_tokenizer import make_tokenizer_folder

_VOCAB_SIZE = 400


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.load(make_tokenizer_folder(Path(mkdtemp())))


token_ids = st.lists(st.integers(0, _VOCAB_SIZE - 1), max_size=60)
# Two letters and longer stop strings make them overlap themselves and one another.
texts = st.text("a中", max_size=40)
stop_lists = st.lists(st.text("a中", min_size=3, max_size=7) | st.text("a中b", min_size=1), min_size=1, max_size=3)


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(token_ids)
def test_pieces_join_to_the_librarys_own_decoding_of_the_whole(ids: list[int]) -> None:
    decoder = IncrementalDecoder(tokenizer().token_bytes)
    text = "".join(map(decoder.push, ids)) + decoder.finish()
    assert text == tokenizer()._backend.decode(ids, skip_special_tokens=True)


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(st.text(max_size=40))
def test_text_survives_encoding_and_piecewise_decoding_and_no_piece_has_half_a_character(text: str) -> None:
    decoder = IncrementalDecoder(tokenizer().token_bytes)
    pieces = [decoder.push(token) for token in tokenizer().encode(text, add_special_tokens=False)]
    assert "".join(pieces) + decoder.finish() == text
    if "�" not in text:
        assert not any("�" in piece for piece in pieces)


def test_half_a_character_at_the_end_becomes_a_replacement_character() -> None:
    decoder = IncrementalDecoder(TokenBytes({0: b"a\xe4\xb8"}, frozenset(), strips_leading_space=False))
    assert (decoder.push(0), decoder.finish()) == ("a", "�")


def naive_cut(text: str, stops: list[str], *, includes_stop: bool) -> str:
    """Try every end; there, the longest stop string."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end if includes_stop else end - len(max(found, key=len))]
    return text


@settings(max_examples=500, deadline=None, derandomize=True, database=None)
@given(texts, stop_lists, st.data(), st.booleans())
def test_a_stop_string_cuts_where_a_naive_search_does_for_any_split(
    text: str, stops: list[str], data: st.DataObject, includes_stop: bool
) -> None:
    matcher = StopMatcher(stops, includes_stop=includes_stop)
    shown, start = "", 0
    while start < len(text):
        end = data.draw(st.integers(start + 1, len(text)))
        shown += matcher.push(text[start:end])
        assert text.startswith(shown), "text was shown that had to be taken back"
        start = end
    assert shown + matcher.finish() == naive_cut(text, stops, includes_stop=includes_stop)
    assert (matcher.matched is not None) == any(stop in text for stop in stops)


@pytest.mark.parametrize(
    ("text", "stops", "shown"),
    [
        ("hello there", ["re", "there", "ere"], "hello "),
        ("hello there", ["the", "hell"], ""),
        ("aaab!", ["aab"], "a"),
        ("ababac!", ["abac"], "ab"),
        ("no stop", ["x"], "no stop"),
    ],
)
def test_the_first_end_counts_and_there_the_longest_stop_string(text: str, stops: list[str], shown: str) -> None:
    matcher = StopMatcher(stops)
    assert "".join(map(matcher.push, text)) + matcher.finish() == shown


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(texts, stop_lists)
def test_no_more_is_held_back_than_may_begin_a_stop_string(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    shown = "".join(map(matcher.push, text))
    if matcher.matched is None:
        held = text[len(shown) :]
        assert held == max((p for p in _prefixes(stops) if text.endswith(p)), key=len)


def _prefixes(stops: list[str]) -> list[str]:
    return [stop[:length] for stop in stops for length in range(len(stop))]


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(token_ids, st.lists(st.sampled_from(["e", " the", "th", "中", "1", "\n", "he r"]), min_size=1, max_size=3))
def test_the_worker_and_the_door_agree_on_the_token_that_stops(ids: list[int], stops: list[str]) -> None:
    detector = StopStringDetector(tokenizer(), stops)
    text = OutputText(tokenizer().token_bytes, stops)
    shown = ""
    for token in ids:
        shown += text.push(token)
        assert detector.push(token) == text.is_stopped
        assert not any(stop in shown for stop in stops)
        if text.is_stopped:
            return
    shown += text.finish()
    assert shown == tokenizer().decode(ids)


def test_a_resumed_detector_equals_one_that_saw_everything() -> None:
    ids = tokenizer().encode("Once upon a time there was a river")
    whole, resumed = (StopStringDetector(tokenizer(), ["re was"]) for _ in range(2))
    expected = [whole.push(token) for token in ids]
    assert True in expected
    for cut in range(len(ids)):
        resumed = StopStringDetector(tokenizer(), ["re was"])
        assert [resumed.push(token) for token in ids[:cut]] + [resumed.push(token) for token in ids[cut:]] == expected
