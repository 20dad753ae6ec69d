"""Tool calls as text: how a model is told of tools, and how its calls are found in what it says.

    <tool_call>
    {"name": "lookup", "arguments": {"key": 1}}
    </tool_call>

The form is that of the Hermes and Qwen families. A template that knows tools is given them as they are; for one
that does not, they are written into the messages.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

CALL_BEGIN = "<tool_call>"
CALL_END = "</tool_call>"

_INSTRUCTIONS = """\
You may call one or more functions to assist with the user query. Their signatures:
<tools>
{signatures}
</tools>

For each function call, return a JSON object with the function's name and arguments within tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""

Message = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the model made; `arguments` is a JSON object as text."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ToolText:
    """What was found in some more text: words for the reader, and calls."""

    content: str
    calls: tuple[ToolCall, ...]


def messages_with_tools(messages: Sequence[Message], tools: Sequence[Mapping[str, object]]) -> list[dict[str, object]]:
    """The messages with tools, calls and results written out, for a template that knows none of them."""
    written = [_written(message) for message in messages]
    if not tools:
        return written
    instructions = _INSTRUCTIONS.format(signatures="\n".join(json.dumps(tool) for tool in tools))
    if written and written[0]["role"] == "system":
        written[0] = {"role": "system", "content": f"{written[0]['content']}\n\n{instructions}"}
        return written
    return [{"role": "system", "content": instructions}, *written]


def _written(message: Message) -> dict[str, object]:
    content = message.get("content") or ""
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
    calls = message.get("tool_calls") or ()
    assert isinstance(calls, Sequence)
    parts = [str(content)] if content else []
    parts += [f"{CALL_BEGIN}\n{json.dumps(call['function'], ensure_ascii=False)}\n{CALL_END}" for call in calls]
    return {"role": message["role"], "content": "\n".join(parts)}


class ToolCallParser:
    """Finds calls in a text that comes piece by piece. What is no call of a known tool stays text."""

    def __init__(self, names: Collection[str]) -> None:
        """`names`: of the tools."""
        self._names = frozenset(names)
        self._held = ""
        self._has_calls = False

    def push(self, text: str) -> ToolText:
        """Everything that is certain by now: text that cannot begin a call, and complete calls."""
        self._held += text
        content: list[str] = []
        calls: list[ToolCall] = []
        while True:
            begin = self._held.find(CALL_BEGIN)
            if begin < 0:
                keep = _partial_length(self._held)
                cut = len(self._held) - keep
                content.append(self._held[:cut])
                self._held = self._held[cut:]
                break
            content.append(self._held[:begin])
            end = self._held.find(CALL_END, begin)
            if end < 0:
                self._held = self._held[begin:]
                break
            block, self._held = self._held[begin : end + len(CALL_END)], self._held[end + len(CALL_END) :]
            call = self._parsed(block)
            if call is None:
                content.append(block)
            else:
                calls.append(call)
                self._has_calls = True
        return ToolText(self._spoken(content), tuple(calls))

    def finish(self) -> ToolText:
        """The text has ended; what was held back is no call. Call once."""
        held, self._held = self._held, ""
        return ToolText(self._spoken([held]), ())

    def _spoken(self, content: Sequence[str]) -> str:
        """White space around calls is layout, not speech."""
        spoken = "".join(content)
        return spoken if not self._has_calls or spoken.strip() else ""

    def _parsed(self, block: str) -> ToolCall | None:
        try:
            document = json.loads(block.removeprefix(CALL_BEGIN).removesuffix(CALL_END))
        except (ValueError, RecursionError):
            return None
        if not isinstance(document, dict):
            return None
        name, arguments = document.get("name"), document.get("arguments", {})
        if not isinstance(name, str) or name not in self._names or not isinstance(arguments, dict):
            return None
        return ToolCall(name, json.dumps(arguments, ensure_ascii=False))


def _partial_length(text: str) -> int:
    """Characters at the end of `text` that may begin a call."""
    return next((n for n in range(min(len(text), len(CALL_BEGIN) - 1), 0, -1) if CALL_BEGIN.startswith(text[-n:])), 0)
