"""`ChoiceStream`: the door's truth about one token stream (C9). Pure: no clock, no loop, no network.

accepted tokens: 0 .. n-1 | n | n+1 ...
                 repeats    ^   held until n arrives: two workers' events may overtake each other
                            next
"""

from dataclasses import dataclass, replace
from enum import Enum, auto

from scheduler.messages import TokenEvent
from scheduler.spec import AttemptId, FinishReason, RequestSpec
from serving.output_text import OutputText


class Arrival(Enum):
    """What became of a token event."""

    ACCEPTED = auto()
    HELD = auto()
    """It is ahead of the next position."""
    REPEATED = auto()
    """The position is known, with this very token."""
    DIVERGED = auto()
    """The position is known with another token: a broken promise of bit-exactness (E1)."""
    OUT_OF_RANGE = auto()
    """No position of this stream."""


@dataclass(frozen=True, slots=True)
class ChoiceDelta:
    """What a stream gained since the last look: text, and the end when it was reached."""

    index: int
    text: str
    finish_reason: FinishReason | None


class ChoiceStream:
    """Tokens, text and end of one choice.

    Attributes:
        spec: what was asked for.
        index: number of the choice in the answer.
        token_ids: accepted tokens; only ever appended to.
        finish_reason: set once, by the last token.
        is_confirmed_end: the worker itself named the last token, in an attempt not given up before.
    """

    __slots__ = (
        "_ahead",
        "_attempts",
        "_eos_token_ids",
        "_given_up",
        "_is_news",
        "_text",
        "_unread",
        "finish_reason",
        "index",
        "is_confirmed_end",
        "spec",
        "token_ids",
    )

    def __init__(self, spec: RequestSpec, index: int, text: OutputText, eos_token_ids: frozenset[int]) -> None:
        """Start before the first token. A stream of no tokens at all is finished at once."""
        self.spec = spec
        self.index = index
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None if spec.stop.max_tokens else FinishReason.LENGTH
        self.is_confirmed_end = self.is_finished
        self._text = text
        self._eos_token_ids = eos_token_ids
        self._ahead: dict[int, TokenEvent] = {}
        self._attempts: set[AttemptId] = set()
        self._given_up: set[AttemptId] = set()
        self._unread: list[str] = []
        self._is_news = self.is_finished

    @property
    def is_finished(self) -> bool:
        """Whether the last token is there."""
        return self.finish_reason is not None

    @property
    def has_gap(self) -> bool:
        """Whether later tokens wait for an earlier one."""
        return bool(self._ahead) and not self.is_finished

    def receive(self, event: TokenEvent) -> Arrival:
        """Take one event, in any order and any number of times. Mutates only when ACCEPTED or HELD."""
        next_position = len(self.token_ids)
        if 0 <= event.position < next_position:
            is_same = self.token_ids[event.position] == event.token_id
            return Arrival.REPEATED if is_same else Arrival.DIVERGED
        if self.is_finished or not 0 <= event.position < self.spec.stop.max_tokens:
            return Arrival.OUT_OF_RANGE
        self._attempts.add(event.attempt_id)
        if event.position > next_position:
            if event.position in self._ahead:
                return Arrival.REPEATED
            self._ahead[event.position] = event
            return Arrival.HELD
        self._accept(event)
        while not self.is_finished and (follower := self._ahead.pop(len(self.token_ids), None)) is not None:
            self._accept(follower)
        return Arrival.ACCEPTED

    def take_delta(self) -> ChoiceDelta | None:
        """Everything new since the last call, in one piece; None when nothing is."""
        if not self._is_news:
            return None
        self._is_news = False
        text = "".join(self._unread)
        self._unread.clear()
        return ChoiceDelta(self.index, text, self.finish_reason)

    def continuation(self) -> RequestSpec:
        """The same request, to be continued after the accepted tokens by a new attempt."""
        return replace(self.spec, accepted_token_ids=tuple(self.token_ids), is_continuation=True)

    def give_up_attempts(self) -> None:
        """The attempts so far are lost. What they sent ahead of a gap is forgotten: it will come again."""
        self._ahead.clear()
        self.doubt_attempts()

    def doubt_attempts(self) -> None:
        """Another attempt may run beside those so far, so that the end of one is not the end of all."""
        self._given_up |= self._attempts

    def _accept(self, event: TokenEvent) -> None:
        self.token_ids.append(event.token_id)
        self._is_news = True
        if not self._is_stop_token(event):
            self._unread.append(self._text.push(event.token_id))
        reason = event.finish_reason
        if self._text.is_stopped:
            reason = FinishReason.STOP
        elif reason is None and len(self.token_ids) >= self.spec.stop.max_tokens:
            reason = FinishReason.LENGTH
        if reason is None:
            return
        self.is_confirmed_end = event.finish_reason is not None and event.attempt_id not in self._given_up
        self._unread.append(self._text.finish())
        # The stream's very last characters may complete a stop string.
        self.finish_reason = FinishReason.STOP if self._text.is_stopped else reason
        self._ahead.clear()

    def _is_stop_token(self, event: TokenEvent) -> bool:
        """Whether this token ended the stream by its id: then it is counted, but is no text."""
        if event.finish_reason is not FinishReason.STOP:
            return False
        stop = self.spec.stop
        is_eos = event.token_id in self._eos_token_ids and not stop.ignore_eos
        return is_eos or event.token_id in stop.stop_token_ids
