"""`SimulatedDoor`: owns every request until its last token, and proves that no token is lost, repeated or invented.

It accepts the next position only, drops repeats, and submits again what lost its attempt, with the tokens
that it has (C9). A gap or a token that the rule does not give is a bug and raises.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from scheduler.messages import DoorNotice, TokenBatch, TokenEvent
from scheduler.spec import DoorName, RequestSpec, RequestUid, SamplingParams, StopParams
from serving.simulation.arrivals import Arrival
from serving.simulation.engine import drawn_token
from serving.simulation.event_queue import EventQueue

DOOR = DoorName("door")
_MAX_RESUBMISSIONS = 20
_RESUBMIT_AFTER_S = 0.1


class StreamError(Exception):
    """A stream that no deployment may produce; the message names request and position."""


@dataclass(slots=True)
class Stream:
    """One request at the door.

    Attributes:
        spec: as first submitted.
        arrived_s: when the client asked.
        accepted: tokens in order.
        first_s: arrival of the first token.
        last_s: arrival of the last token so far.
        num_resubmissions: attempts that the door had to ask for again.
        failure: why it ended without its last token.
        is_done: whether it has ended.
    """

    spec: RequestSpec
    arrived_s: float
    accepted: list[int] = field(default_factory=list)
    first_s: float = 0.0
    last_s: float = 0.0
    num_resubmissions: int = 0
    failure: str | None = None
    is_done: bool = False


class SimulatedDoor:
    """All streams of a run.

    Attributes:
        streams: by uid, in order of arrival.
        num_open: streams that have not ended.
        num_repeats: tokens that came twice and were dropped.
    """

    def __init__(
        self,
        events: EventQueue,
        submit: Callable[[RequestSpec], None],
        cancel: Callable[[RequestUid], None],
    ) -> None:
        """`submit` and `cancel` reach the central scheduler."""
        self._events = events
        self._submit = submit
        self._cancel = cancel
        self.streams: dict[RequestUid, Stream] = {}
        self.num_open = 0
        self.num_repeats = 0

    def expect(self, arrivals: Sequence[Arrival]) -> None:
        """Post every arrival."""
        self.num_open += len(arrivals)
        for number, arrival in enumerate(arrivals):
            self._events.at(arrival.at_s, lambda number=number, arrival=arrival: self._arrive(number, arrival))  # type: ignore[misc]

    def _arrive(self, number: int, arrival: Arrival) -> None:
        spec = RequestSpec(
            uid=RequestUid(f"request-{number}"),
            door=DOOR,
            prompt_token_ids=arrival.prompt_token_ids,
            sampling=SamplingParams(seed=number),
            stop=StopParams(max_tokens=arrival.output_length, ignore_eos=True),
        )
        self.streams[spec.uid] = Stream(spec, self._events.now_s)
        self._submit(spec)

    def on_tokens(self, batch: TokenBatch) -> None:
        """Token events of one step of one worker."""
        for event in batch.events:
            self._on_token(self.streams[event.uid], event)

    def _on_token(self, stream: Stream, event: TokenEvent) -> None:
        position = len(stream.accepted)
        if event.token_id != drawn_token(stream.spec.sampling.seed, event.position):
            msg = f"{event.uid}: token {event.token_id} at position {event.position} is not what it draws there"
            raise StreamError(msg)
        if event.position < position or stream.is_done:
            self.num_repeats += 1
            return
        if event.position > position:
            msg = f"{event.uid}: position {event.position} came when {position} was next"
            raise StreamError(msg)
        stream.accepted.append(event.token_id)
        stream.last_s = self._events.now_s
        if position == 0:
            stream.first_s = self._events.now_s
        is_last = len(stream.accepted) == stream.spec.stop.max_tokens
        if is_last != (event.finish_reason is not None):
            msg = f"{event.uid}: token {position} of {stream.spec.stop.max_tokens} says {event.finish_reason}"
            raise StreamError(msg)
        if is_last:
            self._end(stream)

    def on_notices(self, notices: Sequence[DoorNotice]) -> None:
        """Attempts that ended early."""
        for notice in notices:
            stream = self.streams[notice.uid]
            if stream.is_done:
                continue
            if not notice.retriable or stream.num_resubmissions >= _MAX_RESUBMISSIONS:
                stream.failure = f"{notice.kind}: {notice.message}"
                self._end(stream)
                continue
            stream.num_resubmissions += 1
            self._events.after(_RESUBMIT_AFTER_S, lambda stream=stream: self._resubmit(stream))  # type: ignore[misc]

    def _resubmit(self, stream: Stream) -> None:
        # A token that was under way may have ended it meanwhile.
        if not stream.is_done:
            self._submit(replace(stream.spec, accepted_token_ids=tuple(stream.accepted)))

    def _end(self, stream: Stream) -> None:
        stream.is_done = True
        self.num_open -= 1
        if stream.num_resubmissions:
            self._cancel(stream.spec.uid)
