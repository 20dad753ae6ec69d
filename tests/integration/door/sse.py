"""Reading server-sent events in tests."""

import json
from typing import Any

DONE = "[DONE]"


def payloads(text: str) -> list[str]:
    """The `data:` payloads of a whole stream; every line must be one, or empty."""
    assert text.endswith("\n\n")
    lines = [line for line in text.split("\n") if line]
    assert all(line.startswith("data: ") for line in lines), text
    return [line.removeprefix("data: ") for line in lines]


def events(text: str) -> list[dict[str, Any]]:
    """The JSON events; `[DONE]` must be there once, at the end."""
    found = payloads(text)
    assert found.count(DONE) == 1
    assert found[-1] == DONE
    return [json.loads(payload) for payload in found[:-1]]
