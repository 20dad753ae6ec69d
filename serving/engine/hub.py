"""Gets a model of the Hugging Face hub by its id, `organisation/name`, where the network allows.

Knows nothing of what is in it: `model_folder` refuses kinds that the engine does not compute. `huggingface_hub`
does the work: resumed downloads, checked sizes, private models by the token that it keeps.
"""

import re
from pathlib import Path

from serving.engine.errors import FetchError

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_FILES = ("*.json", "*.safetensors", "*.jinja")
"""Weights in other forms are not read, so they are not downloaded."""


def is_hub_id(name_or_path: str) -> bool:
    """Whether it has the form of a hub id and is nothing on this disk."""
    is_id = _HUB_ID.fullmatch(name_or_path) is not None and not name_or_path.startswith(".")
    return is_id and not Path(name_or_path).exists()


def fetch_from_hub(hub_id: str, cache_dir: Path, endpoint: str | None = None) -> Path:
    """The model's folder, downloaded on the first call and found by every later one, network or not.

    Args:
        hub_id: organisation/name.
        cache_dir: where models are kept.
        endpoint: URL of the hub; None for the one that huggingface_hub is set up for.

    Raises:
        FetchError: the hub cannot be reached, or has no such model for us.
    """
    folder = cache_dir / "models" / "hub" / hub_id
    complete = folder.with_name(f"{folder.name}.complete")
    if complete.is_file():
        return folder
    import httpx  # both only where something is downloaded
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        snapshot_download(hub_id, local_dir=folder, allow_patterns=list(_FILES), endpoint=endpoint)
    except (HfHubHTTPError, LocalEntryNotFoundError, httpx.HTTPError, OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        msg = f"cannot fetch {hub_id} from the Hugging Face hub: {reason} (a folder or a GGUF file needs no network)"
        raise FetchError(msg) from error
    # The folder fills up file by file; this says that the last one is there.
    complete.touch()
    return folder
