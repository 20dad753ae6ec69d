"""The shape of answers: whole ones and stream chunks, of completions and of chats."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from scheduler.spec import FinishReason, TokenLogprobs
from serving.api.logprobs import Echo, LogprobWording
from serving.open_request import Usage
from serving.stream import ChoiceDelta, ScoredToken
from serving.tools import ToolCallParser

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

    def chunk(self, delta: ChoiceDelta) -> Json | None:
        """What a choice gained; None when there is nothing to show yet."""
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

    def __init__(self, envelope: Envelope, logprobs: LogprobWording | None, tool_names: Collection[str] = ()) -> None:
        """Args.

        envelope: of this request.
        logprobs: words them; None when nobody asked.
        tool_names: of the tools whose calls are looked for in the text.
        """
        self._envelope = envelope
        self._logprobs = logprobs
        self._tool_names = tool_names
        self._speakers: dict[int, _Speaker] = {}

    def whole(self, choices: Sequence[FinishedChoice], usage: Usage) -> Json:
        """See AnswerFormat."""
        worded: list[Json] = []
        for index, choice in enumerate(choices):
            speaker = self._speaker(index)
            content, calls = speaker.hear(choice.text, is_last=True)
            message: Json = {"role": "assistant", "content": content, "refusal": None}
            if calls:
                message |= {"content": content or None, "tool_calls": calls}
            reason = speaker.reason(choice.finish_reason)
            scores = self._scores(choice.scored)
            worded.append({"index": index, "message": message, "logprobs": scores, "finish_reason": reason})
        return {**self._envelope.wrap("chat.completion", worded), "usage": _usage(usage)}

    def opening(self, delta: ChoiceDelta) -> Json | None:
        """The role, which only the first delta carries."""
        return self._chunk(delta.index, {"role": "assistant", "content": ""}, None)

    def chunk(self, delta: ChoiceDelta) -> Json | None:
        """See AnswerFormat."""
        speaker = self._speaker(delta.index)
        first = speaker.num_calls
        content, calls = speaker.hear(delta.text, is_last=delta.finish_reason is not None)
        said: Json = {"content": content} if content or (delta.scored and not calls) else {}
        if calls:
            said["tool_calls"] = [{"index": first + n, **call} for n, call in enumerate(calls)]
        if not said and delta.finish_reason is None:
            return None
        return self._chunk(delta.index, said, speaker.reason(delta.finish_reason), self._scores(delta.scored))

    def usage_chunk(self, usage: Usage) -> Json:
        """See AnswerFormat."""
        return {**self._envelope.wrap("chat.completion.chunk", []), "usage": _usage(usage)}

    def _chunk(
        self, index: int, delta: Mapping[str, object], finish_reason: str | None, logprobs: Json | None = None
    ) -> Json:
        choice: Json = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return self._envelope.wrap_chunk("chat.completion.chunk", [choice])

    def _scores(self, scored: Sequence[ScoredToken]) -> Json | None:
        return self._logprobs.chat(scored) if self._logprobs is not None and scored else None

    def _speaker(self, index: int) -> "_Speaker":
        if index not in self._speakers:
            suffix = self._envelope.api_id.partition("-")[2]
            self._speakers[index] = _Speaker(self._tool_names, f"call_{suffix}_{index}")
        return self._speakers[index]


class _Speaker:
    """One choice of a chat: tells its tool calls from its words."""

    def __init__(self, tool_names: Collection[str], id_prefix: str) -> None:
        self._parser = ToolCallParser(tool_names) if tool_names else None
        self._id_prefix = id_prefix
        self.num_calls = 0

    def hear(self, text: str, *, is_last: bool) -> tuple[str, list[Json]]:
        """More of its text; returns words and calls that are certain."""
        if self._parser is None:
            return text, []
        found = self._parser.push(text)
        rest = self._parser.finish().content if is_last else ""
        calls: list[Json] = []
        for call in found.calls:
            function = {"name": call.name, "arguments": call.arguments}
            calls.append({"id": f"{self._id_prefix}_{self.num_calls}", "type": "function", "function": function})
            self.num_calls += 1
        return found.content + rest, calls

    def reason(self, reason: FinishReason | None) -> str | None:
        """Why it ended, in a client's words."""
        return "tool_calls" if reason is FinishReason.STOP and self.num_calls else reason


def _usage(usage: Usage) -> Json:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
