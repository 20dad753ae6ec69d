"""What a chat's answer must look like: free text, JSON, or calls of tools."""

from collections.abc import Mapping
from dataclasses import dataclass

from serving.api.errors import ApiError
from serving.api.schema import ChatCompletionRequest
from serving.api.tool_schema import NamedToolChoice, Tool
from serving.grammar import GrammarError, calls_grammar, json_grammar
from serving.tools import CALL_BEGIN, CALL_END

_MAX_CALLS = 16
"""Calls in one answer that must call: a weak model would go on to its limit."""


@dataclass(frozen=True, slots=True)
class ChatForm:
    """The form of one chat's answer.

    Attributes:
        tools: what the model is told of; none with `tool_choice` none.
        grammar: what the output must follow; empty is free.
        param: the parameter that the grammar comes from.
    """

    tools: tuple[Tool, ...] = ()
    grammar: str = ""
    param: str = ""

    @property
    def tool_names(self) -> frozenset[str]:
        """Names that a call may have."""
        return frozenset(tool.function.name for tool in self.tools)


def chat_form(fields: ChatCompletionRequest) -> ChatForm:
    """Read tools, tool_choice and response_format.

    Raises:
        ApiError: they contradict each other, or a schema is no schema.
    """
    choice = fields.tool_choice or "auto"
    tools = tuple(fields.tools or ()) if choice != "none" else ()
    form = ChatForm(tools)
    if choice not in ("none", "auto"):
        must_call = _called(choice, tools)
        schemas: dict[str, object] = {
            tool.function.name: {"type": "object", **(tool.function.parameters or {})} for tool in must_call
        }
        is_single = isinstance(choice, NamedToolChoice) or fields.parallel_tool_calls is False
        max_calls = 1 if is_single else _MAX_CALLS
        grammar = calls_grammar(schemas, begin=f"{CALL_BEGIN}\n", end=f"\n{CALL_END}", max_calls=max_calls)
        form = ChatForm(tools, grammar, "tools")
    schema = _response_schema(fields)
    if schema is not None:
        if form.grammar:
            msg = "response_format cannot be combined with a tool_choice that must call"
            raise ApiError(400, msg, param="response_format")
        try:
            form = ChatForm(tools, json_grammar(schema), "response_format")
        except GrammarError as error:
            raise ApiError(400, f"response_format: {error}", param="response_format") from error
    if form.grammar and fields.ignore_eos:
        raise ApiError(400, f"ignore_eos cannot be combined with {form.param}", param="ignore_eos")
    return form


def _called(choice: object, tools: tuple[Tool, ...]) -> tuple[Tool, ...]:
    """The tools of which one must be called."""
    if not isinstance(choice, NamedToolChoice):
        if not tools:
            raise ApiError(400, "tool_choice required needs tools", param="tool_choice")
        return tools
    named = tuple(tool for tool in tools if tool.function.name == choice.function.name)
    if not named:
        msg = f"tool_choice names {choice.function.name[:100]!r}, which is none of the tools"
        raise ApiError(400, msg, param="tool_choice")
    return named


def _response_schema(fields: ChatCompletionRequest) -> Mapping[str, object] | bool | None:
    form = fields.response_format
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return {"type": "object"}
    if form.json_schema is None:
        msg = "response_format.json_schema is required with type json_schema"
        raise ApiError(400, msg, param="response_format.json_schema")
    return form.json_schema.json_schema
