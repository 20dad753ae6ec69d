"""W3C's traceparent header."""

import pytest

from serving.trace_context import TraceContext

_TRACE, _PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def test_a_callers_trace_is_continued() -> None:
    assert TraceContext.of_header(f"00-{_TRACE}-{_PARENT}-01", "f") == TraceContext(_TRACE, _PARENT)
    assert TraceContext.of_header(f"00-{_TRACE}-{_PARENT}-02", "f") == TraceContext(_TRACE, _PARENT, is_sampled=False)


def test_a_later_version_with_more_fields_is_read_as_far_as_it_is_known() -> None:
    assert TraceContext.of_header(f"cc-{_TRACE}-{_PARENT}-01-more", "f") == TraceContext(_TRACE, _PARENT)


@pytest.mark.parametrize(
    "header",
    [
        "", "x", f"00-{_TRACE}-{_PARENT}", f"00-{'0' * 32}-{_PARENT}-01", f"00-{_TRACE}-{'0' * 16}-01",
        f"ff-{_TRACE}-{_PARENT}-01", f"00-{_TRACE.upper()}-{_PARENT}-01", f"00-{_TRACE}-{_PARENT}-01-more",
    ],
)  # fmt: skip
def test_a_malformed_header_begins_a_new_trace(header: str) -> None:
    assert TraceContext.of_header(header, "f" * 32) == TraceContext("f" * 32)
