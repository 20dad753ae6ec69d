"""Tool calls in text: found whole however the text is cut, and nothing else is taken for one."""

import json

import pytest

from serving.tools import Message, ToolCall, ToolCallParser, messages_with_tools

CALL = '<tool_call>\n{"name": "look", "arguments": {"key": [1, "ä"]}}\n</tool_call>'
TOOL = {"type": "function", "function": {"name": "look"}}


def _parse(text: str, size: int) -> tuple[str, list[ToolCall]]:
    parser = ToolCallParser(["look"])
    found = [parser.push(text[first : first + size]) for first in range(0, len(text), size)] + [parser.finish()]
    return "".join(part.content for part in found), [call for part in found for call in part.calls]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 500])
def test_calls_are_found_however_the_text_is_cut(size: int) -> None:
    content, calls = _parse(f"Let me <see>. {CALL}\n{CALL}\n", size)
    assert content.strip() == "Let me <see>."
    assert calls == [ToolCall("look", '{"key": [1, "ä"]}')] * 2


@pytest.mark.parametrize("size", [1, 4, 500])
@pytest.mark.parametrize(
    "text",
    [
        "no call at all",
        "<tool_cal",
        "<tool_call>\nnot closed",
        "<tool_call>not json</tool_call>",
        '<tool_call>{"name": "other", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "look", "arguments": 5}</tool_call>',
        '<tool_call>{"name": ["look"]}</tool_call> and on',
        "<tool_call>" + "[" * 100_000 + "</tool_call>",
    ],
)
def test_what_is_no_call_of_a_known_tool_stays_text(text: str, size: int) -> None:
    if size < len(text) // 10_000:
        pytest.skip("searching such a text by the character is slow")
    assert _parse(text, size) == (text, [])


def test_a_template_without_tools_gets_them_as_messages() -> None:
    call = {"type": "function", "function": {"name": "look", "arguments": {"key": 1}}}
    messages: list[Message] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "42"},
    ]
    written = messages_with_tools(messages, [TOOL])
    assert [message["role"] for message in written] == ["system", "user", "assistant", "user"]
    assert str(written[0]["content"]).startswith("Be brief.")
    assert json.dumps(TOOL) in str(written[0]["content"])
    assert written[2]["content"] == '<tool_call>\n{"name": "look", "arguments": {"key": 1}}\n</tool_call>'
    assert written[3]["content"] == "<tool_response>\n42\n</tool_response>"
    assert messages_with_tools(messages[1:2], []) == messages[1:2]
