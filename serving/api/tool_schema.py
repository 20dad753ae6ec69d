"""Wire models of tools, tool calls and response formats."""

import json
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

MAX_TOOLS = 128
_NAME = r"[A-Za-z0-9_-]{1,64}"


class _Wire(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="ignore", protected_namespaces=())


class FunctionDefinition(_Wire):
    """A function that the model may call."""

    name: str = Field(pattern=f"^{_NAME}$")
    description: str | None = None
    parameters: dict[str, object] | None = None


class Tool(_Wire):
    """One of `tools`."""

    type: Literal["function"]
    function: FunctionDefinition


class _FunctionName(_Wire):
    name: str


class NamedToolChoice(_Wire):
    """The one function that must be called."""

    type: Literal["function"]
    function: _FunctionName


ToolChoice = Literal["none", "auto", "required"] | NamedToolChoice


def read_tool_choice(value: object) -> object:
    """The choice, read by hand, so that an error does not name a branch of a union."""
    if value is None or value in ("none", "auto", "required"):
        return value
    if isinstance(value, dict):
        return NamedToolChoice.model_validate(value)
    msg = "must be none, auto, required or an object that names a function"
    raise ValueError(msg)


def _arguments(value: object) -> str:
    """A JSON object as text."""
    if isinstance(value, str):
        try:
            if isinstance(json.loads(value or "{}"), dict):
                return value or "{}"
        except (ValueError, RecursionError):
            pass
    msg = "must be a JSON object, as a string"
    raise ValueError(msg)


class CalledFunction(_Wire):
    """What an earlier call called."""

    name: str
    arguments: Annotated[str, BeforeValidator(_arguments)]


class EarlierCall(_Wire):
    """A call that an assistant message contains."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class JsonSchemaFormat(_Wire):
    """`json_schema` of a response format."""

    name: str | None = Field(None, max_length=64)
    json_schema: dict[str, object] | bool = Field(alias="schema")


class ResponseFormat(_Wire):
    """`response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None
