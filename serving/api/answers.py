"""The shape of answers: whole ones and stream chunks, of completions and of chats."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from scheduler.spec import FinishReason, TokenLogprobs
from serving.api.logprobs import Echo, LogprobWording
from serving.open_request import Usage
from serving.stream import ChoiceDelta, ScoredToken

Json = dict[str, object]


@dataclass(frozen=True, slots=True)
class FinishedChoice:
    """One choice of a whole answer; see `ChoiceDelta`."""

    text: str
    finish_reason: FinishReason
    scored: tuple[ScoredToken, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None


class AnswerFormat(Protocol):
    """How one endpoint words what the streams produced."""

    def whole(self, choices: Sequence[FinishedChoice], usage: Usage) -> Json:
        """The answer of a request that does not stream."""
        ...

    def opening(self, delta: ChoiceDelta) -> Json | None:
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

    def __init__(self, envelope: Envelope, echoes: Sequence[Echo], logprobs: LogprobWording | None) -> None:
        """Args.

        envelope: of this request.
        echoes: by choice, the prompt to repeat; empty ones without `echo`.
        logprobs: words them; None when nobody asked.
        """
        self._envelope = envelope
        self._echoes = echoes
        self._logprobs = logprobs

    def whole(self, choices: Sequence[FinishedChoice], usage: Usage) -> Json:
        """See AnswerFormat."""
        worded = [
            self._choice(index, self._echoes[index].text + choice.text, choice.finish_reason)
            | {"logprobs": self._scores(index, choice.scored, choice.prompt_logprobs)}
            for index, choice in enumerate(choices)
        ]
        return {**self._envelope.wrap("text_completion", worded), "usage": _usage(usage)}

    def opening(self, delta: ChoiceDelta) -> Json | None:
        """The echoed prompt."""
        echo = self._echoes[delta.index]
        if not echo.text:
            return None
        choice = self._choice(delta.index, echo.text, None)
        return self._chunk(choice | {"logprobs": self._scores(delta.index, (), delta.prompt_logprobs)})

    def chunk(self, delta: ChoiceDelta) -> Json:
        """See AnswerFormat."""
        choice = self._choice(delta.index, delta.text, delta.finish_reason)
        return self._chunk(choice | {"logprobs": self._scores(delta.index, delta.scored, None)})

    def usage_chunk(self, usage: Usage) -> Json:
        """See AnswerFormat."""
        return {**self._envelope.wrap("text_completion", []), "usage": _usage(usage)}

    def _chunk(self, choice: Json) -> Json:
        return self._envelope.wrap_chunk("text_completion", [choice])

    def _choice(self, index: int, text: str, finish_reason: FinishReason | None) -> Json:
        return {"index": index, "text": text, "logprobs": None, "finish_reason": finish_reason}

    def _scores(self, index: int, scored: Sequence[ScoredToken], prompt: Sequence[TokenLogprobs] | None) -> Json | None:
        if self._logprobs is None or (not scored and prompt is None):
            return None
        return self._logprobs.completion(scored, self._echoes[index], prompt)


class ChatAnswers:
    """`chat.completion` objects and their chunks."""

    def __init__(self, envelope: Envelope, logprobs: LogprobWording | None) -> None:
        """Args.

        envelope: of this request.
        logprobs: words them; None when nobody asked.
        """
        self._envelope = envelope
        self._logprobs = logprobs

    def whole(self, choices: Sequence[FinishedChoice], usage: Usage) -> Json:
        """See AnswerFormat."""
        worded: list[Json] = [
            {
                "index": index,
                "message": {"role": "assistant", "content": choice.text, "refusal": None},
                "logprobs": self._scores(choice.scored),
                "finish_reason": choice.finish_reason,
            }
            for index, choice in enumerate(choices)
        ]
        return {**self._envelope.wrap("chat.completion", worded), "usage": _usage(usage)}

    def opening(self, delta: ChoiceDelta) -> Json | None:
        """The role, which only the first delta carries."""
        return self._chunk(delta.index, {"role": "assistant", "content": ""}, None)

    def chunk(self, delta: ChoiceDelta) -> Json:
        """See AnswerFormat."""
        content = {"content": delta.text} if delta.text or delta.scored else {}
        return self._chunk(delta.index, content, delta.finish_reason, self._scores(delta.scored))

    def usage_chunk(self, usage: Usage) -> Json:
        """See AnswerFormat."""
        return {**self._envelope.wrap("chat.completion.chunk", []), "usage": _usage(usage)}

    def _chunk(
        self, index: int, delta: Mapping[str, object], finish_reason: FinishReason | None, logprobs: Json | None = None
    ) -> Json:
        choice: Json = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return self._envelope.wrap_chunk("chat.completion.chunk", [choice])

    def _scores(self, scored: Sequence[ScoredToken]) -> Json | None:
        return self._logprobs.chat(scored) if self._logprobs is not None and scored else None


def _usage(usage: Usage) -> Json:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
