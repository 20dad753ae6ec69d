"""`StreamMetrics`: latencies and outcomes of token streams, as one door sees them.

Names and units are those that dashboards for vLLM know; times are seconds on the door's clock, except for
phases, which workers measure as durations on their own clocks (M7).
"""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric

from serving.metrics.recent_latencies import RecentLatencies
from serving.timeline import ChoiceTimeline, StreamState

# Dashboards aggregate over servers by bucket: these are the borders that vLLM uses.
_FIRST_TOKEN_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
_INTER_TOKEN_S = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
_REQUEST_S = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0,
    960.0, 1920.0, 7680.0,
)  # fmt: skip
_TRANSFER_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_TOKENS = tuple(float(step * 10**power) for power in range(5) for step in (1, 2, 5))

_LABELS = ("model_name", "role", "door")
_ROLE = "door"


class StreamMetrics:
    """Counters and histograms of one door.

    Attributes:
        registry: all of them.
        recent: the last latencies themselves, for percentiles without buckets.
    """

    def __init__(self, model: str, door: str) -> None:
        """Begin at zero.

        Args:
            model: the name in the API; a label of everything.
            door: the same for every life of it; a label, so that a restart looks like one.
        """
        self.registry = CollectorRegistry()
        self.recent = RecentLatencies()
        self._labels = (model, _ROLE, door)
        self._prompt_tokens = self._counter("vllm:prompt_tokens", "Prompt tokens of requests that got a first token.")
        self._generation_tokens = self._counter("vllm:generation_tokens", "Tokens that streams have accepted.")
        self._successes = Counter(
            "vllm:request_success",
            "Choices that ended well, by reason.",
            (*_LABELS, "finished_reason"),
            registry=self.registry,
        )
        self._failures = Counter(
            "pdserve:request_failure",
            "Choices that ended by a fault or were given up by their client.",
            (*_LABELS, "outcome"),
            registry=self.registry,
        )
        self._resubmissions = self._counter("pdserve:resubmissions", "Lost attempts that another one continued.")
        self._open = Gauge(
            "pdserve:open_choices", "Choices that a door streams now.", _LABELS, registry=self.registry
        ).labels(*self._labels)
        self._first_token = self._histogram(
            "vllm:time_to_first_token_seconds", "From submission to the first token.", _FIRST_TOKEN_S
        )
        self._inter_token = self._histogram(
            "vllm:inter_token_latency_seconds", "Between two tokens of a stream.", _INTER_TOKEN_S
        )
        self._per_token = self._histogram(
            "vllm:request_time_per_output_token_seconds",
            "Mean time between the tokens of one choice.",
            _INTER_TOKEN_S,
        )
        self._total = self._histogram(
            "vllm:e2e_request_latency_seconds", "From submission to the last token.", _REQUEST_S
        )
        self._queue = self._histogram(
            "vllm:request_queue_time_seconds", "Before the first token, with nothing computed or moved.", _REQUEST_S
        )
        self._prefill = self._histogram(
            "vllm:request_prefill_time_seconds", "In the context phase, all attempts together.", _REQUEST_S
        )
        self._decode = self._histogram(
            "vllm:request_decode_time_seconds", "From the first token to the last.", _REQUEST_S
        )
        self._transfer = self._histogram(
            "pdserve:request_transfer_time_seconds",
            "Waiting for a generation worker's room and its pages.",
            _TRANSFER_S,
        )
        self._prompt_lengths = self._histogram("vllm:request_prompt_tokens", "Prompt tokens of a choice.", _TOKENS)
        self._output_lengths = self._histogram("vllm:request_generation_tokens", "Tokens of a choice.", _TOKENS)

    def families(self, num_open: int) -> tuple[Metric, ...]:
        """All of them as they are now; another process may have them.

        Args:
            num_open: choices that the door streams now.
        """
        self._open.set(num_open)
        return tuple(self.registry.collect())

    def on_tokens(self, num_new: int, since_last_s: float | None) -> None:
        """A stream accepted tokens.

        Args:
            num_new: how many at once; more than one only when an earlier one was late.
            since_last_s: seconds since the previous one; None for the first.
        """
        self._generation_tokens.inc(num_new)
        if since_last_s is not None:
            self._inter_token.observe(since_last_s)
            self.recent.inter_token_s.append(since_last_s)

    def on_first_token(self, timeline: ChoiceTimeline) -> None:
        """A stream has begun."""
        assert timeline.first_token_at_s is not None
        self._prompt_tokens.inc(timeline.num_prompt_tokens)
        self._prompt_lengths.observe(timeline.num_prompt_tokens)
        first_token_s = timeline.first_token_at_s - timeline.submitted_at_s
        self._first_token.observe(first_token_s)
        self.recent.first_token_s.append(first_token_s)

    def on_end(self, timeline: ChoiceTimeline) -> None:
        """A stream is over; called once for each."""
        self._resubmissions.inc(timeline.num_resubmissions)
        if timeline.state is not StreamState.FINISHED or timeline.finish_reason is None:
            self._failures.labels(*self._labels, timeline.state.value).inc()
            return
        self._successes.labels(*self._labels, timeline.finish_reason.value).inc()
        self._output_lengths.observe(timeline.num_tokens)
        if timeline.first_token_at_s is None or timeline.ended_at_s is None:
            return  # a stream of no tokens
        self._total.observe(timeline.ended_at_s - timeline.submitted_at_s)
        decode_s = timeline.ended_at_s - timeline.first_token_at_s
        self._decode.observe(decode_s)
        if timeline.num_tokens > 1:
            self._per_token.observe(decode_s / (timeline.num_tokens - 1))
        self._queue.observe(timeline.queued_s(timeline.ended_at_s))
        self._prefill.observe(timeline.phase_s("context"))
        self._transfer.observe(timeline.phase_s("offer") + timeline.phase_s("transfer"))

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, _LABELS, registry=self.registry).labels(*self._labels)

    def _histogram(self, name: str, text: str, borders: tuple[float, ...]) -> Histogram:
        family = Histogram(name, text, _LABELS, registry=self.registry, buckets=borders)
        return family.labels(*self._labels)
