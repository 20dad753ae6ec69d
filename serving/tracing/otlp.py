"""`OtlpTraces`: finished requests as OpenTelemetry spans, sent to a collector by OTLP over HTTP.

The door exports the spans of every process: workers told it durations, which it has put on its own clock. The SDK
batches and sends on a thread of its own; a collector that is away costs log lines and lost spans, never a request.
Sampling, headers and the rest follow the SDK's own environment variables (OTEL_...).

    request (door)
    └── choice (door)
        ├── queue (central, then the worker)
        ├── prefill (worker)
        │   └── prefill.chunk ...
        ├── queue (central), offer, transfer (generation worker)
        └── decode, paused ... (worker)
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from serving.timeline import ChoiceTimeline, RequestTimeline, StreamState, TimedSpan

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span

_NAMES = {"central": "queue", "context": "prefill", "chunk": "prefill.chunk", "generation": "decode"}
"""What operators call them; the other phases keep their names."""
_TRACES_PATH = "/v1/traces"


class TracingUnavailableError(RuntimeError):
    """The packages for tracing are not installed."""


class OtlpTraces:
    """Exports what it is called with."""

    def __init__(
        self, endpoint: str, model: str, door: str, *, clock: Callable[[], float], wall_clock_ns: Callable[[], int]
    ) -> None:
        """Start the exporter's thread; nothing is sent yet.

        Args:
            endpoint: the collector's URL; without a path, OTLP's own is taken.
            model: the name in the API.
            door: of this process.
            clock: the one on which timelines were measured.
            wall_clock_ns: Unix nanoseconds.

        Raises:
            TracingUnavailableError: the extra `tracing` is not installed.
        """
        try:
            from opentelemetry import trace
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
        except ImportError as error:
            msg = f"server.otlp_endpoint is set, but {error.name} is missing: pip install 'pdserve[tracing]'"
            raise TracingUnavailableError(msg) from error

        class ChosenTraceIds(RandomIdGenerator):
            """The trace's name was given when the request came."""

            next_trace_id = 0

            def generate_trace_id(self) -> int:
                return self.next_trace_id

        self._trace = trace
        self._ids = ChosenTraceIds()
        resource = Resource.create({"service.name": "pdserve", "service.instance.id": door})
        self._provider = TracerProvider(id_generator=self._ids, resource=resource)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=_with_path(endpoint))))
        self._tracer = self._provider.get_tracer("pdserve")
        self._model = model
        self._door = door
        self._clock = clock
        self._wall_clock_ns = wall_clock_ns

    def export(self, timeline: RequestTimeline) -> None:
        """Queue the spans of a request that has ended. One that has no trace is left out."""
        if timeline.trace is None:
            return
        to_ns = self._to_ns()
        self._ids.next_trace_id = int(timeline.trace.trace_id, 16)
        root = self._tracer.start_span(
            "request",
            context=self._parent(timeline),
            kind=self._trace.SpanKind.SERVER,
            start_time=to_ns(min(choice.submitted_at_s for choice in timeline.choices)),
            attributes={
                "pdserve.process": self._door,
                "gen_ai.request.model": self._model,
                "gen_ai.response.id": timeline.api_id,
            },
        )
        for choice in timeline.choices:
            self._export_choice(choice, self._under(root), to_ns)
        self._set_status(root, timeline.state, "")
        root.end(to_ns(max(choice.ended_at_s or choice.submitted_at_s for choice in timeline.choices)))

    def close(self) -> None:
        """Send what is queued, within the exporter's own time limit. Once; blocks."""
        self._provider.shutdown()

    def _export_choice(self, choice: ChoiceTimeline, above: "Context", to_ns: Callable[[float], int]) -> None:
        attributes: dict[str, Any] = {
            "pdserve.process": self._door,
            "pdserve.choice": choice.index,
            "pdserve.resubmissions": choice.num_resubmissions,
            "gen_ai.usage.input_tokens": choice.num_prompt_tokens,
            "gen_ai.usage.output_tokens": choice.num_tokens,
            "gen_ai.usage.cache_read.input_tokens": choice.cached_tokens or 0,
        }
        if choice.finish_reason is not None:
            attributes["gen_ai.response.finish_reasons"] = [choice.finish_reason.value]
        span = self._tracer.start_span(
            "choice", context=above, start_time=to_ns(choice.submitted_at_s), attributes=attributes
        )
        if choice.first_token_at_s is not None:
            span.add_event("first_token", timestamp=to_ns(choice.first_token_at_s))
        spans = choice.spans()
        chunks = [each for each in spans if each.name == "chunk"]
        for each in spans:
            if each.name != "chunk":
                inner = [chunk for chunk in chunks if chunk.is_chunk_of(each)]
                self._export_span(each, inner, self._under(span), to_ns)
        self._set_status(span, choice.state, choice.error or "")
        span.end(to_ns(choice.submitted_at_s if choice.ended_at_s is None else choice.ended_at_s))

    def _export_span(
        self, timed: TimedSpan, inner: list[TimedSpan], above: "Context", to_ns: Callable[[float], int]
    ) -> None:
        attributes: dict[str, Any] = {"pdserve.process": timed.process, "pdserve.attempt": timed.attempt_id}
        if timed.num_tokens:
            attributes["pdserve.num_tokens"] = timed.num_tokens
        span = self._tracer.start_span(
            _NAMES.get(timed.name, timed.name), context=above, start_time=to_ns(timed.began_at_s), attributes=attributes
        )
        for each in inner:
            self._export_span(each, [], self._under(span), to_ns)
        span.end(to_ns(timed.began_at_s + timed.lasted_s))

    def _parent(self, timeline: RequestTimeline) -> "Context":
        trace = timeline.trace
        assert trace is not None
        if not trace.parent_id:
            return self._trace.set_span_in_context(self._trace.INVALID_SPAN)
        flags = self._trace.TraceFlags(self._trace.TraceFlags.SAMPLED if trace.is_sampled else 0)
        context = self._trace.SpanContext(
            int(trace.trace_id, 16), int(trace.parent_id, 16), is_remote=True, trace_flags=flags
        )
        return self._trace.set_span_in_context(self._trace.NonRecordingSpan(context))

    def _under(self, span: "Span") -> "Context":
        return self._trace.set_span_in_context(span)

    def _set_status(self, span: "Span", state: StreamState, message: str) -> None:
        if state in (StreamState.FAILED, StreamState.CANCELLED):
            span.set_attribute("pdserve.outcome", state.value)
        if state is StreamState.FAILED:
            span.set_status(self._trace.Status(self._trace.StatusCode.ERROR, message))

    def _to_ns(self) -> Callable[[float], int]:
        """From the timelines' clock to Unix nanoseconds, as the two stand now."""
        now_s, wall_ns = self._clock(), self._wall_clock_ns()
        return lambda at_s: wall_ns - round((now_s - at_s) * 1e9)


def _with_path(endpoint: str) -> str:
    return endpoint if urlsplit(endpoint).path.strip("/") else endpoint.rstrip("/") + _TRACES_PATH
