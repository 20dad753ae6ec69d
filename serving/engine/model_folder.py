"""A model's folder in Hugging Face layout: which files it has, its `ModelConfig`, its fingerprint.

Reads JSON and bytes only; no tensor library, so that a process without an engine can ask too.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from safetensors import SafetensorError, safe_open

from configs import ModelConfig
from serving.engine.errors import ModelFileError

CONFIG_FILE = "config.json"
GENERATION_CONFIG_FILE = "generation_config.json"
WEIGHTS_FILE = "model.safetensors"
WEIGHTS_INDEX_FILE = "model.safetensors.index.json"
TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
HASHES_FILE = "pdserve_hashes.json"

_HASH_CHUNK_BYTES = 1 << 20
_WINDOWED_TYPES = ("mistral", "ministral")
"""Computed like Llama but for the windows: every layer has one, or `layer_types` says which."""
_DEFAULT_WINDOW = 4096
"""What a file of these types means that has no `sliding_window`."""
_SINKS_KEY = "num_sink_tokens"
"""Our own key: no published family has sinks by position."""


def read_json_object(path: Path) -> dict[str, object]:
    """Parse a file that holds one JSON object.

    Raises:
        ModelFileError: missing, unreadable, not JSON, or not an object.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelFileError(path, f"cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise ModelFileError(path, f"is not valid JSON ({error})") from error
    if not isinstance(document, dict):
        raise ModelFileError(path, "is not a JSON object")
    return document


def load_model_config(folder: Path) -> ModelConfig:
    """Read `config.json` (and the end-of-sequence ids of `generation_config.json`).

    Raises:
        ModelFileError: missing or damaged, or a feature that this engine does not compute; a model is
            refused by name rather than run wrong (I7).
    """
    path = folder / CONFIG_FILE
    raw = read_json_object(path)
    _refuse_other_architectures(path, raw)
    hidden_size = _integer(path, raw, "hidden_size")
    num_heads = _integer(path, raw, "num_attention_heads")
    if num_heads <= 0:
        raise ModelFileError(path, f"num_attention_heads={num_heads} must be above 0")
    ids = _token_ids(path, raw, "eos_token_id")
    generation_path = folder / GENERATION_CONFIG_FILE
    if generation_path.is_file():
        ids += _token_ids(generation_path, read_json_object(generation_path), "eos_token_id")
    bos_ids = _token_ids(path, raw, "bos_token_id")
    try:
        return ModelConfig(
            num_layers=_integer(path, raw, "num_hidden_layers"),
            hidden_size=hidden_size,
            intermediate_size=_integer(path, raw, "intermediate_size"),
            num_heads=num_heads,
            num_kv_heads=_integer(path, raw, "num_key_value_heads", num_heads),
            head_dim=_integer(path, raw, "head_dim", hidden_size // num_heads),
            vocab_size=_integer(path, raw, "vocab_size"),
            max_position=_integer(path, raw, "max_position_embeddings"),
            rope_theta=_rope_theta(path, raw),
            rms_norm_eps=_number(path, raw, "rms_norm_eps"),
            tie_embeddings=raw.get("tie_word_embeddings", False) is True,
            bos_token_id=bos_ids[0] if bos_ids else None,
            eos_token_ids=tuple(dict.fromkeys(ids)),
            layer_windows=_layer_windows(path, raw),
            num_sink_tokens=_integer(path, raw, _SINKS_KEY, 0),
        )
    except ValueError as error:
        raise ModelFileError(path, str(error)) from error


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder: the single one, or every shard that the index names.

    Raises:
        ModelFileError: there is none, or a shard is missing.
    """
    single = folder / WEIGHTS_FILE
    if single.is_file():
        return [single]
    index_path = folder / WEIGHTS_INDEX_FILE
    if not index_path.is_file():
        raise ModelFileError(single, f"is missing, and so is {WEIGHTS_INDEX_FILE}")
    weight_map = read_json_object(index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelFileError(index_path, "has no weight_map")
    files = sorted({folder / str(name) for name in weight_map.values()})
    for file in files:
        if not file.is_file():
            raise ModelFileError(file, f"is missing, although {WEIGHTS_INDEX_FILE} names it")
    return files


def check_model_folder(folder: Path) -> None:
    """Check that all files which serving needs are there and that the model is of a supported kind.

    Raises:
        ModelFileError: names the first file that is missing or wrong.
    """
    if not folder.is_dir():
        raise ModelFileError(folder, "is not a folder")
    load_model_config(folder)
    for file in weight_files(folder):
        _check_weight_file(file)
    for name in (TOKENIZER_FILE, TOKENIZER_CONFIG_FILE):
        read_json_object(folder / name)


def _check_weight_file(file: Path) -> None:
    """Compare the header with the file's size, so that a half copied file is refused before workers start."""
    try:
        with safe_open(file, framework="numpy"):
            pass
    except (SafetensorError, OSError) as error:
        raise ModelFileError(file, f"is damaged or not a safetensors file ({error})") from error


def model_fingerprint(folder: Path) -> str:
    """Hash of the configuration and every byte of the weights; equal on two workers iff the model is.

    Takes about a second per GB, unless the folder has the hashes of exactly these files
    (`record_weight_hashes`: same sizes, same modification times).

    Raises:
        ModelFileError: a file is missing or unreadable.
    """
    digest = hashlib.sha256(json.dumps(asdict(load_model_config(folder))).encode())
    recorded = _recorded_hashes(folder)
    for file in weight_files(folder):
        digest.update((recorded.get(_mark(file)) or hash_file(file)).encode())
    return digest.hexdigest()


def record_weight_hashes(folder: Path) -> None:
    """Keep the hashes of the weights beside them, so that workers start without reading every byte first."""
    hashes = {_mark(file): hash_file(file) for file in weight_files(folder)}
    (folder / HASHES_FILE).write_text(json.dumps(hashes), encoding="utf-8")


def _recorded_hashes(folder: Path) -> Mapping[str, str]:
    path = folder / HASHES_FILE
    return {key: str(value) for key, value in read_json_object(path).items()} if path.is_file() else {}


def _mark(file: Path) -> str:
    """A file as it is now: any write to it changes the mark."""
    status = file.stat()
    return f"{file.name} {status.st_size} {status.st_mtime_ns}"


def hash_file(path: Path) -> str:
    """SHA-256 of a file's bytes, in hex.

    Raises:
        ModelFileError: the file cannot be read.
    """
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while chunk := file.read(_HASH_CHUNK_BYTES):
                digest.update(chunk)
    except OSError as error:
        raise ModelFileError(path, f"cannot be read ({error.strerror})") from error
    return digest.hexdigest()


def _refuse_other_architectures(path: Path, raw: Mapping[str, object]) -> None:
    expected: dict[str, tuple[object, ...]] = {
        "model_type": ("llama", *_WINDOWED_TYPES),
        "hidden_act": ("silu", None),
        "attention_bias": (False, None),
        "mlp_bias": (False, None),
        "rope_scaling": (None,),
        "quantization_config": (None,),
    }
    for key, allowed in expected.items():
        if raw.get(key) not in allowed:
            raise ModelFileError(path, f"{key}={raw.get(key)!r} is not supported (only {allowed[0]!r})")


def _layer_windows(path: Path, raw: Mapping[str, object]) -> tuple[int | None, ...]:
    """The window of each layer, as transformers understands the file; empty where all layers see everything."""
    if raw["model_type"] not in _WINDOWED_TYPES:
        return ()
    has_window = raw.get("sliding_window", _DEFAULT_WINDOW) is not None
    window = _integer(path, raw, "sliding_window", _DEFAULT_WINDOW) if has_window else None
    num_layers = _integer(path, raw, "num_hidden_layers")
    types = raw.get("layer_types")
    if types is None:
        return (window,) * num_layers if has_window else ()
    if raw["model_type"] != "ministral":
        raise ModelFileError(path, f"layer_types is not part of model_type={raw['model_type']!r}")
    windows = {"full_attention": None, "sliding_attention": window}
    if not isinstance(types, list) or not all(kind in windows for kind in types):
        raise ModelFileError(path, f"layer_types={types!r} must list {' or '.join(windows)} for each layer")
    if not has_window and "sliding_attention" in types:
        raise ModelFileError(path, "layer_types has sliding_attention, but sliding_window is null")
    return tuple(windows[kind] for kind in types)


def _rope_theta(path: Path, raw: Mapping[str, object]) -> float:
    # transformers 5 moved rope_theta into rope_parameters; older folders have it at the top.
    parameters = raw.get("rope_parameters")
    if not isinstance(parameters, dict):
        return _number(path, raw, "rope_theta", 10000.0)
    if parameters.get("rope_type", "default") != "default":
        raise ModelFileError(path, f"rope_type={parameters['rope_type']!r} is not supported (only 'default')")
    return _number(path, parameters, "rope_theta", 10000.0)


def _integer(path: Path, raw: Mapping[str, object], key: str, default: int | None = None) -> int:
    value = raw.get(key)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int):
        raise ModelFileError(path, f"{key} must be an integer, not {value!r}")
    return value


def _number(path: Path, raw: Mapping[str, object], key: str, default: float | None = None) -> float:
    value = raw.get(key)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ModelFileError(path, f"{key} must be a number, not {value!r}")
    return float(value)


def _token_ids(path: Path, raw: Mapping[str, object], key: str) -> list[int]:
    """One id, a list of ids, or none at all."""
    value = raw.get(key)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for token_id in ids:
        if isinstance(token_id, bool) or not isinstance(token_id, int):
            raise ModelFileError(path, f"{key}={value!r} is neither an integer nor a list of them")
    return list(ids)
