"""The text of a generated token stream, and where a stop string ends it.

The worker that samples (through `StopStringDetector`) and the door (through `OutputText`) run the very
same code over the same tokens, so they cannot disagree on where a text ends (C9).

    token ids ─► IncrementalDecoder ─► text ─► StopMatcher ─► text that may be shown
                 holds back half a              holds back what may
                 UTF-8 character                begin a stop string
"""

import codecs
from collections.abc import Sequence

from serving.token_bytes import TokenBytes
from serving.tokenizer import Tokenizer


class IncrementalDecoder:
    """Text of a stream, token by token. All parts joined equal the decoding of the whole."""

    __slots__ = ("_strip_next", "_token_bytes", "_utf8")

    def __init__(self, token_bytes: TokenBytes) -> None:
        """Start at the beginning of a text."""
        self._token_bytes = token_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._strip_next = token_bytes.strips_leading_space

    def push(self, token_id: int) -> str:
        """The characters that this token completes; may be empty."""
        return self._stripped(self._utf8.decode(self._token_bytes.piece(token_id)))

    def finish(self) -> str:
        """What an unfinished character becomes at the end of the stream. Call once."""
        return self._stripped(self._utf8.decode(b"", final=True))

    def _stripped(self, text: str) -> str:
        if self._strip_next and text:
            self._strip_next = False
            return text.removeprefix(" ")
        return text


class _StopString:
    """One stop string as an automaton: how much of it the text read so far ends with."""

    __slots__ = ("_fallback", "matched", "text")

    def __init__(self, text: str) -> None:
        """Build the table (Knuth, Morris, Pratt), so that a character costs constant time on average."""
        self.text = text
        self.matched = 0
        self._fallback = [0] * len(text)
        length = 0
        for i in range(1, len(text)):
            while length and text[i] != text[length]:
                length = self._fallback[length - 1]
            length += text[i] == text[length]
            self._fallback[i] = length

    def step(self, character: str) -> bool:
        """Read one character; True when it completes the string. Then only `go_on` may be called next."""
        while self.matched and character != self.text[self.matched]:
            self.matched = self._fallback[self.matched - 1]
        self.matched += character == self.text[self.matched]
        return self.matched == len(self.text)

    def go_on(self) -> None:
        """The string is complete and does not count: look for the next one, which may overlap it."""
        self.matched = self._fallback[-1]


class StopMatcher:
    """Ends a text at the first place where a stop string is complete; the longest one wins there.

    Attributes:
        matched: the stop string that ended the text.
    """

    __slots__ = ("_held", "_includes_stop", "_stops", "matched")

    def __init__(self, stop_strings: Sequence[str], *, includes_stop: bool = False) -> None:
        """Args.

        stop_strings: none of them empty.
        includes_stop: the stop string stays part of the text.
        """
        self._stops = [_StopString(text) for text in dict.fromkeys(stop_strings)]
        self._includes_stop = includes_stop
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str, *, may_stop: bool = True) -> str:
        """The characters that are certain to be part of the text.

        Args:
            text: what comes next.
            may_stop: a stop string that ends in `text` counts.
        """
        if self.matched is not None:
            return ""
        if not self._stops:
            return text
        #  buffer:  | certain | may begin a stop string |
        #                      ^ len(buffer) - longest partial match
        buffer = self._held + text
        for end, character in enumerate(text, start=len(self._held) + 1):
            complete = [stop for stop in self._stops if stop.step(character)]
            if complete and not may_stop:
                for stop in complete:
                    stop.go_on()
            elif complete:
                self.matched = max((stop.text for stop in complete), key=len)
                self._held = ""
                return buffer[: end if self._includes_stop else end - len(self.matched)]
        cut = len(buffer) - max(stop.matched for stop in self._stops)
        self._held = buffer[cut:]
        return buffer[:cut]

    def finish(self) -> str:
        """What was held back and turned out to be no stop string."""
        held, self._held = self._held, ""
        return held


class OutputText:
    """The text of one generated stream.

    Attributes:
        num_decoded: characters that the tokens so far have completed, held back or not.
    """

    __slots__ = ("_decoder", "_matcher", "_min_tokens", "num_decoded")

    def __init__(
        self,
        token_bytes: TokenBytes,
        stop_strings: Sequence[str] = (),
        *,
        includes_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        """Args: see StopMatcher; stop strings that the first `min_tokens` tokens complete do not count."""
        self._decoder = IncrementalDecoder(token_bytes)
        self._matcher = StopMatcher(stop_strings, includes_stop=includes_stop)
        self._min_tokens = min_tokens
        self.num_decoded = 0

    def push(self, token_id: int) -> str:
        """Add a token; returns the text that it makes certain."""
        text = self._decoder.push(token_id)
        self.num_decoded += len(text)
        if self._min_tokens:
            self._min_tokens -= 1
            return self._matcher.push(text, may_stop=False)
        return self._matcher.push(text)

    def finish(self) -> str:
        """The stream has ended: the rest of the text. Call once."""
        rest = self._decoder.finish()
        return self._matcher.push(rest, may_stop=not self._min_tokens) + self._matcher.finish()

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string has ended the text."""
        return self._matcher.matched is not None


class StopStringDetector:
    """For the worker that samples: says which token completes a stop string."""

    __slots__ = ("_text",)

    def __init__(self, tokenizer: Tokenizer, stop_strings: Sequence[str], min_tokens: int = 0) -> None:
        """Start at the first generated token; a resubmitted stream's accepted tokens are pushed first."""
        self._text = OutputText(tokenizer.token_bytes, stop_strings, min_tokens=min_tokens)

    def push(self, token_id: int) -> bool:
        """Add a token; True once a stop string is complete. Stop tokens themselves are not pushed."""
        self._text.push(token_id)
        return self._text.is_stopped
