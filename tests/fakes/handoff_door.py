"""`HandoffDoor`: owns every stream of a handoff world, and proves that no token is lost, repeated or invented (C9)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from scheduler.messages import DoorNotice, ErrorKind, TokenBatch, TokenEvent
from scheduler.spec import DoorName, RequestSpec, RequestUid, SamplingParams, StopParams, Term
from tests.fakes.handoff_engine import drawn_token

DOOR = DoorName("door")


@dataclass(slots=True)
class DoorStream:
    """One request; `ends` has every terminal event it ever had, so more than one is a fault (I2)."""

    spec: RequestSpec
    accepted: list[int] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)
    kind: ErrorKind | None = None
    num_resubmissions: int = 0
    num_repeats: int = 0
    cached_tokens: list[int] = field(default_factory=list)

    @property
    def is_open(self) -> bool:
        """Whether it waits for more."""
        return not self.ends


class HandoffDoor:
    """All streams, by uid.

    Attributes:
        violations: tokens that no deployment may send.
    """

    def __init__(
        self, submit: Callable[[RequestSpec], None], cancel: Callable[[RequestUid], None], max_resubmissions: int = 50
    ) -> None:
        """`submit` and `cancel` send to the central scheduler."""
        self._submit = submit
        self._cancel = cancel
        self._max_resubmissions = max_resubmissions
        self.streams: dict[RequestUid, DoorStream] = {}
        self.violations: list[str] = []
        self._term = Term(0)

    def claim(self, term: Term) -> list[RequestSpec]:
        """A new term asks: every stream that is open, to go on after its tokens (C6)."""
        self._term = max(self._term, term)
        return [replace(s.spec, accepted_token_ids=tuple(s.accepted)) for s in self.open_streams]

    def open(self, prompt: Sequence[int], max_tokens: int, *, priority: int = 0) -> DoorStream:
        """A client asks."""
        number = len(self.streams)
        spec = RequestSpec(
            uid=RequestUid(f"r{number}"),
            door=DOOR,
            prompt_token_ids=tuple(prompt),
            sampling=SamplingParams(seed=number),
            stop=StopParams(max_tokens=max_tokens, ignore_eos=True),
            priority=priority,
        )
        stream = self.streams[spec.uid] = DoorStream(spec)
        self._submit(spec)
        return stream

    def abort(self, stream: DoorStream) -> None:
        """The client goes; also when the stream has ended."""
        if stream.is_open:
            stream.ends.append("aborted")
        self._cancel(stream.spec.uid)

    @property
    def open_streams(self) -> list[DoorStream]:
        """Streams that wait for more."""
        return [stream for stream in self.streams.values() if stream.is_open]

    def on_tokens(self, batch: TokenBatch) -> None:
        """Token events of one step of one worker."""
        for event in batch.events:
            self._on_token(self.streams[event.uid], event)

    def _on_token(self, stream: DoorStream, event: TokenEvent) -> None:
        expected = drawn_token(stream.spec.sampling.seed, event.position)
        if event.token_id != expected:
            self.violations.append(f"{event.uid}: token {event.token_id} at {event.position}, expected {expected}")
        if event.durations is not None and event.durations.cached_tokens is not None:
            stream.cached_tokens.append(event.durations.cached_tokens)
        if not stream.is_open or event.position < len(stream.accepted):
            stream.num_repeats += 1
            return
        if event.position > len(stream.accepted):
            self.violations.append(f"{event.uid}: position {event.position} came when {len(stream.accepted)} was next")
            return
        stream.accepted.append(event.token_id)
        is_last = len(stream.accepted) == stream.spec.stop.max_tokens
        if is_last != (event.finish_reason is not None):
            self.violations.append(f"{event.uid}: token {event.position} says {event.finish_reason}")
        if is_last:
            stream.ends.append("finished")
            if stream.num_resubmissions:
                self._cancel(stream.spec.uid)

    def on_notices(self, notices: Sequence[DoorNotice], term: Term | None = None) -> None:
        """Attempts that ended early; a notice of a term below one that has asked is of no account."""
        if term is not None and term < self._term:
            return
        for notice in notices:
            stream = self.streams[notice.uid]
            if not stream.is_open:
                continue
            if notice.retriable and stream.num_resubmissions < self._max_resubmissions:
                stream.num_resubmissions += 1
                self._submit(replace(stream.spec, accepted_token_ids=tuple(stream.accepted)))
            else:
                stream.kind = notice.kind
                stream.ends.append(f"failed: {notice.kind}: {notice.message}")
