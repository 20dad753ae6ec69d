"""Models by hub id, from a small hub of this host that answers as the public one does."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from serving.engine.errors import FetchError
from serving.engine.hub import fetch_from_hub, is_hub_id
from serving.engine.model_folder import check_model_folder, hash_file
from tests.fakes.tiny_model import write_tiny_model

_COMMIT = "0123456789abcdef0123456789abcdef01234567"
_REPOSITORY = "rivers/tiny"


class _Hub(BaseHTTPRequestHandler):
    """One public repository."""

    folder: Path

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""

    def _answer(self, *, with_body: bool) -> None:
        path = self.path.partition("?")[0]
        prefix = f"/{_REPOSITORY}/resolve/{_COMMIT}/"
        if path.startswith(f"/api/models/{_REPOSITORY}"):
            files = [file.name for file in self.folder.iterdir()]
            entries = [
                {"type": "file", "path": name, "size": (self.folder / name).stat().st_size, "oid": "0"}
                for name in files
            ]
            document = {"id": _REPOSITORY, "sha": _COMMIT, "siblings": [{"rfilename": name} for name in files]}
            body = json.dumps(entries if "/tree/" in path else document).encode()
            self._send(200, body, "application/json", with_body=with_body)
        elif path.startswith(prefix) and (file := self.folder / path.removeprefix(prefix)).is_file():
            headers = {"ETag": f'"{hash_file(file)[:40]}"', "X-Repo-Commit": _COMMIT}
            self._send(200, file.read_bytes(), "application/octet-stream", headers, with_body=with_body)
        else:
            self._send(404, b"{}", "application/json", {"X-Error-Code": "RepoNotFound"}, with_body=with_body)

    def _send(
        self, status: int, body: bytes, kind: str, headers: dict[str, str] | None = None, *, with_body: bool
    ) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(body)


@contextmanager
def _hub(folder: Path) -> Iterator[str]:
    handler = type("Handler", (_Hub,), {"folder": folder})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_a_model_of_the_hub_is_fetched_once_and_then_found_without_a_network(tmp_path: Path) -> None:
    published = write_tiny_model(tmp_path / "published")
    (published / "pytorch_model.bin").write_bytes(b"not read")

    with _hub(published) as url:
        folder = fetch_from_hub(_REPOSITORY, tmp_path / "cache", url)

    check_model_folder(folder)
    assert folder == tmp_path / "cache" / "models" / "hub" / "rivers" / "tiny"
    assert (folder / "model.safetensors").read_bytes() == (published / "model.safetensors").read_bytes()
    assert not (folder / "pytorch_model.bin").exists()
    assert fetch_from_hub(_REPOSITORY, tmp_path / "cache", "http://127.0.0.1:9") == folder


def test_a_model_that_the_hub_does_not_have_is_named(tmp_path: Path) -> None:
    published = write_tiny_model(tmp_path / "published")

    with _hub(published) as url, pytest.raises(FetchError, match=r"cannot fetch rivers/none from the Hugging Face hub"):
        fetch_from_hub("rivers/none", tmp_path / "cache", url)


def test_without_a_network_the_error_says_so_and_what_works_instead(tmp_path: Path) -> None:
    with pytest.raises(FetchError, match=r"cannot fetch rivers/tiny .*\(a folder or a GGUF file needs no network\)"):
        fetch_from_hub(_REPOSITORY, tmp_path / "cache", "http://127.0.0.1:9")


@pytest.mark.parametrize("name", ["smollm2-135m", "./models/tiny", "../tiny", "/models/tiny", "a/b/c", "rivers/", ""])
def test_names_and_paths_are_no_hub_ids(name: str) -> None:
    assert not is_hub_id(name)


def test_a_folder_on_disk_wins_over_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert is_hub_id("rivers/tiny")
    (tmp_path / "rivers" / "tiny").mkdir(parents=True)
    assert not is_hub_id("rivers/tiny")
