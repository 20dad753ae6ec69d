"""`TraceContext`: which trace a request belongs to, in W3C's terms (https://www.w3.org/TR/trace-context/)."""

import re
from dataclasses import dataclass

_HEADER = re.compile(r"(?!ff)([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED = 1


@dataclass(frozen=True, slots=True)
class TraceContext:
    """One trace.

    Attributes:
        trace_id: 32 hexadecimal digits.
        parent_id: the caller's span, 16 digits; empty where the trace begins here.
        is_sampled: whether the caller records it; a trace that begins here is left to the exporter.
    """

    trace_id: str
    parent_id: str = ""
    is_sampled: bool = True

    @classmethod
    def of_header(cls, traceparent: str, fresh_trace_id: str) -> "TraceContext":
        """The caller's trace, or a new one where the header is missing or malformed.

        Args:
            traceparent: the header's value; may be empty.
            fresh_trace_id: name of the new trace.
        """
        match = _HEADER.fullmatch(traceparent.strip())
        if match is None or set(match[2]) == {"0"} or set(match[3]) == {"0"} or (match[1] == "00" and match[5]):
            return cls(fresh_trace_id)
        return cls(match[2], match[3], bool(int(match[4], 16) & _SAMPLED))
