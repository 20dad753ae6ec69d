"""Renders the state tables into ARCHITECTURE.md, between its `<!-- begin ... -->` and `<!-- end ... -->` marks."""

import re
import sys
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path

from scheduler.states import ATTEMPT_TRANSITIONS, REQUEST_TRANSITIONS

ARCHITECTURE = Path(__file__).parents[1] / "ARCHITECTURE.md"


def mermaid(table: Mapping[StrEnum, Mapping[StrEnum, StrEnum]]) -> str:
    """A state diagram of `table`; events that lead the same way share an arrow."""
    arrows: dict[tuple[str, str], list[str]] = {}
    for source, events in table.items():
        for event, target in events.items():
            arrows.setdefault((source.value, target.value), []).append(event.value)
    lines = [f"    {source} --> {target}: {', '.join(events)}" for (source, target), events in arrows.items()]
    return "\n".join(["```mermaid", "stateDiagram-v2", *lines, "```"])


def rendered(text: str) -> str:
    """`text` with both diagrams replaced by fresh ones."""
    for name, table in (("attempt-states", ATTEMPT_TRANSITIONS), ("request-states", REQUEST_TRANSITIONS)):
        pattern = re.compile(rf"(<!-- begin {name} -->\n).*?(<!-- end {name} -->)", re.DOTALL)
        diagram = mermaid(table)
        text, count = pattern.subn(lambda match, body=diagram: f"{match[1]}{body}\n{match[2]}", text)
        if count != 1:
            sys.exit(f"{ARCHITECTURE}: expected one pair of marks for {name}, found {count}")
    return text


if __name__ == "__main__":
    ARCHITECTURE.write_text(rendered(ARCHITECTURE.read_text()))
