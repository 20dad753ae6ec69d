"""Finished measurements in a file, one JSON object a line, so that a run that was stopped goes on."""

import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

Row = dict[str, Any]


class ResultsFile:
    """Rows by key. A key is everything that decides a measurement: another seed is another row."""

    def __init__(self, path: Path | None) -> None:
        """Read what is there; a last line that was cut off is left out. None keeps rows in memory only."""
        self._path = path
        self._rows: dict[str, Row] = {}
        self._is_cut = False
        if path is not None and path.exists():
            text = path.read_text("utf-8")
            self._is_cut = bool(text) and not text.endswith("\n")
            for line in text.splitlines():
                try:
                    entry = json.loads(line)
                except ValueError:
                    continue
                self._rows[_name(entry["key"])] = entry["row"]

    async def get_or_measure(self, key: Row, measure: Callable[[], Awaitable[Row]]) -> Row:
        """The row of this key, measured and appended unless it is there."""
        name = _name(key)
        if name not in self._rows:
            row = await measure()
            self._rows[name] = row
            if self._path is not None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                with self._path.open("a", encoding="utf-8") as lines:
                    lines.write("\n" * self._is_cut + json.dumps({"key": key, "row": row}) + "\n")
                self._is_cut = False
        return self._rows[name]

    def has(self, key: Row) -> bool:
        """Whether this key was measured."""
        return _name(key) in self._rows


def _name(key: Row) -> str:
    return json.dumps(key, sort_keys=True)
