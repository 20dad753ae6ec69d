"""`pdserve trace export` against servers that do not help."""

from pathlib import Path

import pytest

from serving.cli import main


def test_a_server_that_is_not_there_is_one_line_on_stderr(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "trace.json"
    assert main(["trace", "export", "--out", str(file), "--url", "http://127.0.0.1:1"]) == 1
    assert capsys.readouterr().err.startswith("pdserve: http://127.0.0.1:1 cannot be reached")
    assert not file.exists()
