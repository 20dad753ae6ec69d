"""The shape of answers: whole ones and stream chunks, of completions and of chats."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from scheduler.spec import FinishReason
from serving.open_request import Usage
from serving.stream import ChoiceDelta

Json = dict[str, object]


@dataclass(frozen=True, slots=True)
class FinishedChoice:
    """One choice of a whole answer."""

    text: str
    finish_reason: FinishReason


class AnswerFormat(Protocol):
    """How one endpoint words what the streams produced."""

    def whole(self, choices: Sequence[FinishedChoice], usage: Usage) -> Json:
        """The answer of a request that does not stream."""
        ...

    def opening(self, index: int) -> Json | None:
        """A choice's first chunk, before its first delta, if it has one."""
        ...

    def chunk(self, delta: ChoiceDelta) -> Json:
        """What a choice gained."""
        ...

    def usage_chunk(self, usage: Usage) -> Json:
        """The last chunk of a stream that asked for usage."""
        ...


@dataclass(frozen=True, slots=True)
class Envelope:
    """What every chunk and answer of one request carries.

    Attributes:
        has_usage: chunks have a `usage` field, null until the last one.
    """

    api_id: str
    created: int
    model: str
    has_usage: bool

    def wrap(self, kind: str, choices: Sequence[Json]) -> Json:
        """An answer object with these choices."""
        return {
            "id": self.api_id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": list(choices),
        }

    def wrap_chunk(self, kind: str, choices: Sequence[Json]) -> Json:
        """As `wrap`, for a stream."""
        chunk = self.wrap(kind, choices)
        if self.has_usage:
            chunk["usage"] = None
        return chunk


class CompletionAnswers:
    """`text_completion` objects.

    A choice's text begins with its prompt where `echoes` has one.
    """

    def __init__(self, envelope: Envelope, echoes: Sequence[str]) -> None:
        """Args.

        envelope: of this request.
        echoes: by choice, the prompt to repeat; empty strings without `echo`.
        """
        self._envelope = envelope
        self._echoes = echoes

    def whole(self, choices: Sequence[FinishedChoice], usage: Usage) -> Json:
        """See AnswerFormat."""
        worded = [
            _completion_choice(index, self._echoes[index] + choice.text, choice.finish_reason)
            for index, choice in enumerate(choices)
        ]
        return {**self._envelope.wrap("text_completion", worded), "usage": _usage(usage)}

    def opening(self, index: int) -> Json | None:
        """The echoed prompt."""
        if not self._echoes[index]:
            return None
        return self._envelope.wrap_chunk("text_completion", [_completion_choice(index, self._echoes[index], None)])

    def chunk(self, delta: ChoiceDelta) -> Json:
        """See AnswerFormat."""
        choice = _completion_choice(delta.index, delta.text, delta.finish_reason)
        return self._envelope.wrap_chunk("text_completion", [choice])

    def usage_chunk(self, usage: Usage) -> Json:
        """See AnswerFormat."""
        return {**self._envelope.wrap("text_completion", []), "usage": _usage(usage)}


class ChatAnswers:
    """`chat.completion` objects and their chunks."""

    def __init__(self, envelope: Envelope) -> None:
        """Args.

        envelope: of this request.
        """
        self._envelope = envelope

    def whole(self, choices: Sequence[FinishedChoice], usage: Usage) -> Json:
        """See AnswerFormat."""
        worded: list[Json] = [
            {
                "index": index,
                "message": {"role": "assistant", "content": choice.text, "refusal": None},
                "logprobs": None,
                "finish_reason": choice.finish_reason,
            }
            for index, choice in enumerate(choices)
        ]
        return {**self._envelope.wrap("chat.completion", worded), "usage": _usage(usage)}

    def opening(self, index: int) -> Json | None:
        """The role, which only the first delta carries."""
        return self._chunk(index, {"role": "assistant", "content": ""}, None)

    def chunk(self, delta: ChoiceDelta) -> Json:
        """See AnswerFormat."""
        return self._chunk(delta.index, {"content": delta.text} if delta.text else {}, delta.finish_reason)

    def usage_chunk(self, usage: Usage) -> Json:
        """See AnswerFormat."""
        return {**self._envelope.wrap("chat.completion.chunk", []), "usage": _usage(usage)}

    def _chunk(self, index: int, delta: Json, finish_reason: FinishReason | None) -> Json:
        choice: Json = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        return self._envelope.wrap_chunk("chat.completion.chunk", [choice])


def _completion_choice(index: int, text: str, finish_reason: FinishReason | None) -> Json:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": finish_reason}


def _usage(usage: Usage) -> Json:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
