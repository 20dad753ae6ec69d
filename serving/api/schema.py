"""OpenAI's wire models: what a request body may contain, with the usual extensions.

Types are strict (a number is not a string), null means "not given", and unions are read by hand, so that
an error names the parameter and not a branch of a union.
"""

import re
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, Field, model_validator
from pydantic.json_schema import WithJsonSchema

from serving.api.tool_schema import MAX_TOOLS, EarlierCall, ResponseFormat, Tool, ToolChoice, read_tool_choice

MAX_STOP_STRINGS = 4
MAX_STOP_CHARACTERS = 1024
MAX_STOP_TOKENS = 64
MAX_TOP_LOGPROBS = 20

MAX_BIASED_TOKENS = 1024
MAX_REPETITION_PENALTY = 100.0
"""And its reciprocal the least: logits that these divide or multiply stay finite."""
_TOKEN_ID = re.compile(r"[0-9]{1,9}")

_TEXT: dict[str, object] = {"type": "string", "minLength": 1}
_TOKENS: dict[str, object] = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_PROMPT_JSON = WithJsonSchema(
    {
        "anyOf": [
            _TEXT,
            {"type": "array", "items": _TEXT, "minItems": 1},
            _TOKENS,
            {"type": "array", "items": _TOKENS, "minItems": 1},
        ]
    }
)
_STOP_TEXT: dict[str, object] = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARACTERS}
_STOP_JSON = WithJsonSchema(
    {"anyOf": [_STOP_TEXT, {"type": "array", "items": _STOP_TEXT, "maxItems": MAX_STOP_STRINGS}, {"type": "null"}]}
)
_BIAS_JSON = WithJsonSchema(
    {
        "type": ["object", "null"],
        "propertyNames": {"pattern": "^[0-9]{1,9}$"},
        "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
        "maxProperties": MAX_BIASED_TOKENS,
    }
)
_PART: dict[str, object] = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
_CONTENT_JSON = WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": _PART, "minItems": 1}]})

Bias = Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]
Prompt = str | list[int]


def _stop_strings(value: object) -> list[str]:
    texts = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        msg = "must be a string or an array of strings"
        raise ValueError(msg)
    if len(texts) > MAX_STOP_STRINGS:
        msg = f"has {len(texts)} strings; at most {MAX_STOP_STRINGS} are allowed"
        raise ValueError(msg)
    for text in texts:
        if not text or len(text) > MAX_STOP_CHARACTERS:
            msg = f"a stop string must have 1 to {MAX_STOP_CHARACTERS} characters, not {len(text)}"
            raise ValueError(msg)
    return texts


def _prompts(value: object) -> list[Prompt]:
    """A string, strings, token ids, or lists of token ids, as a list of prompts."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if all(isinstance(part, str) for part in value):
            return value
        if all(type(part) is int for part in value):
            return [value]
        if all(isinstance(part, list) and all(type(token) is int for token in part) for part in value):
            return value
    if value == []:
        msg = "must not be empty"
        raise ValueError(msg)
    msg = "must be a string, an array of strings, an array of token ids, or an array of token id arrays"
    raise ValueError(msg)


def _content(value: object) -> str:
    """A message's text: a string, or text parts, joined by line ends."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        msg = "must be a string or a non-empty array of content parts"
        raise ValueError(msg)
    return "\n".join(_part_text(part) for part in value)


def _part_text(part: object) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict) or part.get("type") != "text":
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        msg = f"content part of type {str(kind)[:40]!r} is not supported; use text"
        raise ValueError(msg)
    text = part.get("text")
    if not isinstance(text, str):
        msg = "a text part needs a string in `text`"
        raise ValueError(msg)
    return text


def _logit_bias(value: object) -> object:
    """OpenAI writes token ids as strings."""
    if value is None:
        return {}
    if not isinstance(value, dict) or len(value) > MAX_BIASED_TOKENS:
        msg = f"must be an object of at most {MAX_BIASED_TOKENS} token ids"
        raise ValueError(msg)
    if not all(isinstance(key, str) and _TOKEN_ID.fullmatch(key) for key in value):
        msg = "must have token ids as names"
        raise ValueError(msg)
    return {int(key): bias for key, bias in value.items()}


class _Wire(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="ignore", protected_namespaces=())


class StreamOptions(_Wire):
    """`stream_options`."""

    include_usage: bool | None = None


class GenerationFields(_Wire):
    """What both endpoints take."""

    model_config = ConfigDict(extra="allow")

    model: str
    n: int | None = Field(None, ge=1)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: Annotated[list[str], BeforeValidator(_stop_strings), _STOP_JSON] = []
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    temperature: float | None = Field(None, ge=0, le=2, allow_inf_nan=False)
    top_p: float | None = Field(None, ge=0, le=1, allow_inf_nan=False)
    presence_penalty: float | None = Field(None, ge=-2, le=2, allow_inf_nan=False)
    frequency_penalty: float | None = Field(None, ge=-2, le=2, allow_inf_nan=False)
    logit_bias: Annotated[dict[int, Bias], BeforeValidator(_logit_bias), _BIAS_JSON] = {}
    # extensions
    repetition_penalty: float | None = Field(
        None, ge=1 / MAX_REPETITION_PENALTY, le=MAX_REPETITION_PENALTY, allow_inf_nan=False
    )
    min_tokens: int | None = Field(None, ge=0)
    top_k: int | None = Field(None, ge=-1)
    min_p: float | None = Field(None, ge=0, le=1, allow_inf_nan=False)
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = Field(None, max_length=MAX_STOP_TOKENS)
    include_stop_str_in_output: bool | None = None
    priority: int | None = Field(None, ge=-(2**31), lt=2**31)

    @property
    def unknown_fields(self) -> Mapping[str, object]:
        """What the schema does not name."""
        return self.__pydantic_extra__ or {}


class CompletionRequest(GenerationFields):
    """Body of POST /v1/completions."""

    prompt: Annotated[list[Prompt], BeforeValidator(_prompts), _PROMPT_JSON]
    max_tokens: int | None = Field(None, ge=0)
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    best_of: int | None = Field(None, ge=1)


class ChatMessage(_Wire):
    """One message; `developer` is OpenAI's newer word for `system`."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str, BeforeValidator(_content), _CONTENT_JSON]
    tool_calls: list[EarlierCall] | None = None

    @model_validator(mode="before")
    @classmethod
    def _calls_need_no_content(cls, value: object) -> object:
        if isinstance(value, dict) and value.get("tool_calls") and value.get("content") is None:
            return {**value, "content": ""}
        return value


class ChatCompletionRequest(GenerationFields):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], FailFast()] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    tools: list[Tool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: Annotated[ToolChoice | None, BeforeValidator(read_tool_choice)] = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
