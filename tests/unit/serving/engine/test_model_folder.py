import json
from pathlib import Path
from typing import Any

import pytest

from serving.engine.errors import ModelFileError
from serving.engine.model_folder import (
    check_model_folder,
    load_model_config,
    model_fingerprint,
    record_weight_hashes,
    weight_files,
)
from tests.fakes.tiny_model import tiny_config, write_tiny_model


def _edit(path: Path, **changes: Any) -> None:
    document = json.loads(path.read_text())
    path.write_text(json.dumps({**document, **changes}))


def test_a_folders_configuration_is_read_whole(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, tie_embeddings=False, max_position=512)

    assert load_model_config(tmp_path) == tiny_config(tie_embeddings=False, max_position=512)


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"model_type": "llama", "sliding_window": 64}, ()),
        ({"model_type": "mistral"}, (4096, 4096)),
        ({"model_type": "mistral", "sliding_window": 64}, (64, 64)),
        ({"model_type": "mistral", "sliding_window": None}, ()),
        ({"model_type": "ministral", "sliding_window": 64}, (64, 64)),
        (
            {"model_type": "ministral", "sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"]},
            (64, None),
        ),
    ],
)
def test_windows_are_understood_as_the_family_means_them(
    tmp_path: Path, changes: dict[str, object], windows: tuple[int | None, ...]
) -> None:
    write_tiny_model(tmp_path)
    _edit(tmp_path / "config.json", **changes)

    assert load_model_config(tmp_path).layer_windows == windows


def test_a_windowed_configuration_is_read_whole(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, layer_windows=(24, None), num_sink_tokens=4)

    assert load_model_config(tmp_path) == tiny_config(layer_windows=(24, None), num_sink_tokens=4)


def test_end_of_sequence_ids_of_both_files_are_joined(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    _edit(tmp_path / "generation_config.json", eos_token_id=[7, 2, 9])

    assert load_model_config(tmp_path).eos_token_ids == (2, 7, 9)


def test_rope_theta_is_found_where_newer_folders_keep_it(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    _edit(tmp_path / "config.json", rope_theta=None, rope_parameters={"rope_theta": 5e5, "rope_type": "default"})

    assert load_model_config(tmp_path).rope_theta == 5e5


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"model_type": "qwen2"}, "model_type='qwen2' is not supported"),
        ({"model_type": "mistral", "layer_types": ["full_attention"] * 2}, "layer_types is not part of model_type"),
        (
            {"model_type": "ministral", "layer_types": ["full_attention", "chunked"]},
            "layer_types=['full_attention', 'chunked'] must list",
        ),
        (
            {"model_type": "ministral", "layer_types": ["sliding_attention"] * 2, "sliding_window": None},
            "layer_types has sliding_attention, but sliding_window is null",
        ),
        (
            {"model_type": "ministral", "layer_types": ["full_attention"]},
            "layer_windows has 1 entries for num_layers",
        ),
        ({"model_type": "mistral", "sliding_window": 0}, "layer_windows=(0, 0): a window must be above 0"),
        ({"num_sink_tokens": 4}, "num_sink_tokens=4, but no layer has a window"),
        ({"attention_bias": True}, "attention_bias=True is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "rope_scaling="),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type='yarn' is not supported"),
        ({"hidden_size": "64"}, "hidden_size must be an integer, not '64'"),
        ({"num_hidden_layers": None}, "num_hidden_layers must be an integer, not None"),
        ({"rms_norm_eps": True}, "rms_norm_eps must be a number, not True"),
        ({"num_key_value_heads": 3}, "num_heads=4 is not a multiple of num_kv_heads=3"),
        ({"num_attention_heads": 0}, "num_attention_heads=0 must be above 0"),
        ({"vocab_size": -1}, "vocab_size=-1 must be above 0"),
        ({"eos_token_id": "two"}, "eos_token_id='two' is neither"),
    ],
)
def test_a_configuration_that_cannot_be_run_is_refused_by_key(
    tmp_path: Path, changes: dict[str, object], problem: str
) -> None:
    write_tiny_model(tmp_path)
    _edit(tmp_path / "config.json", **changes)

    with pytest.raises(ModelFileError) as caught:
        load_model_config(tmp_path)

    assert str(caught.value).startswith(f"{tmp_path / 'config.json'}: {problem}")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"])
def test_a_folder_that_lacks_a_file_is_refused_by_its_name(tmp_path: Path, name: str) -> None:
    write_tiny_model(tmp_path)
    check_model_folder(tmp_path)
    (tmp_path / name).unlink()

    with pytest.raises(ModelFileError, match=name):
        check_model_folder(tmp_path)


def test_a_file_that_is_no_json_object_is_refused(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)

    for contents, problem in {"{": "is not valid JSON", "[1]": "is not a JSON object"}.items():
        (tmp_path / "tokenizer.json").write_text(contents)
        with pytest.raises(ModelFileError, match=problem):
            check_model_folder(tmp_path)


def test_every_shard_that_the_index_names_must_be_there(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "a.safetensors")
    index = {"weight_map": {"x": "b.safetensors", "y": "a.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))

    with pytest.raises(ModelFileError, match=r"b\.safetensors: is missing"):
        weight_files(tmp_path)
    (tmp_path / "b.safetensors").write_bytes(b"")
    assert [file.name for file in weight_files(tmp_path)] == ["a.safetensors", "b.safetensors"]


def test_the_fingerprint_depends_on_weights_and_configuration_but_not_on_the_place(tmp_path: Path) -> None:
    prints = {
        "first": model_fingerprint(write_tiny_model(tmp_path / "first")),
        "copy": model_fingerprint(write_tiny_model(tmp_path / "copy")),
        "other weights": model_fingerprint(write_tiny_model(tmp_path / "weights", seed=1)),
        "other rope": model_fingerprint(write_tiny_model(tmp_path / "rope", rope_theta=500.0)),
    }

    assert prints["first"] == prints["copy"]
    assert len(set(prints.values())) == 3


def test_a_weight_file_that_was_cut_short_is_refused_by_its_name(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ModelFileError, match=r"model\.safetensors.*damaged"):
        check_model_folder(folder)


def test_recorded_hashes_spare_the_reading_but_never_hide_a_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_tiny_model(tmp_path)
    fingerprint = model_fingerprint(folder)
    record_weight_hashes(folder)
    with monkeypatch.context() as patch:
        patch.setattr("serving.engine.model_folder.hash_file", lambda path: pytest.fail(f"{path} was read"))
        assert model_fingerprint(folder) == fingerprint
    weights = folder / "model.safetensors"
    damaged = bytearray(weights.read_bytes())
    damaged[-1] ^= 1
    weights.write_bytes(damaged)
    assert model_fingerprint(folder) != fingerprint
