from hypothesis import given
from hypothesis import strategies as st

from scheduler.chunking import equal_progress_tokens, next_chunk_tokens

counts = st.integers(1, 400)


@given(remaining=counts, rows=st.integers(0, 400), unit=counts)
def test_a_chunk_fits_and_is_a_multiple_of_the_unit_unless_it_is_the_last(remaining: int, rows: int, unit: int) -> None:
    chunk = next_chunk_tokens(remaining, rows, unit)
    assert 0 <= chunk <= min(remaining, rows)
    assert chunk == remaining or chunk % unit == 0


@given(remaining=counts, rows=st.integers(0, 400), unit=counts)
def test_no_larger_chunk_would_have_been_allowed(remaining: int, rows: int, unit: int) -> None:
    chunk = next_chunk_tokens(remaining, rows, unit)
    larger = range(chunk + 1, min(remaining, rows) + 1)
    assert not any(tokens == remaining or tokens % unit == 0 for tokens in larger)


@given(remaining=st.lists(counts, max_size=8), rows=st.integers(0, 400), unit=st.integers(1, 100))
def test_equal_progress_keeps_the_rules_of_a_chunk(remaining: list[int], rows: int, unit: int) -> None:
    chunks = equal_progress_tokens(remaining, rows, unit)
    assert sum(chunks) <= rows
    for chunk, rest in zip(chunks, remaining, strict=True):
        assert 0 <= chunk <= rest
        assert chunk == rest or chunk % unit == 0


@given(remaining=st.lists(counts, min_size=2, max_size=8), rows=st.integers(0, 400), unit=st.integers(1, 100))
def test_unfinished_contexts_are_never_more_than_one_unit_apart(remaining: list[int], rows: int, unit: int) -> None:
    chunks = equal_progress_tokens(remaining, rows, unit)
    unfinished = [chunk for chunk, rest in zip(chunks, remaining, strict=True) if chunk < rest]
    assert not unfinished or max(unfinished) - min(unfinished) <= unit


def test_turns_go_to_the_first_in_line_first() -> None:
    assert equal_progress_tokens([100, 100, 100], 5 * 16, 16) == [32, 32, 16]
