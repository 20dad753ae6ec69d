import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from serving.engine.errors import ModelFileError
from serving.engine.fetch import resolve_model
from serving.engine.gguf_convert import convert_gguf
from serving.engine.model_folder import check_model_folder, load_model_config
from tests.fakes.gguf_files import write_tiny_gguf
from tests.fakes.tiny_model import CHAT_TEMPLATE, tiny_config, tiny_tensors


def test_a_converted_file_has_the_tensors_of_the_checkpoint_it_was_made_from(tmp_path: Path) -> None:
    convert_gguf(write_tiny_gguf(tmp_path / "m.gguf"), tmp_path / "m")

    converted, original = load_file(tmp_path / "m" / "model.safetensors"), tiny_tensors(tiny_config())

    assert converted.keys() == original.keys()
    for name, tensor in original.items():
        assert torch.equal(converted[name], tensor), name


def test_quantised_tensors_come_back_within_their_rounding(tmp_path: Path) -> None:
    convert_gguf(write_tiny_gguf(tmp_path / "m.gguf", is_quantized=True), tmp_path / "m")

    converted, original = load_file(tmp_path / "m" / "model.safetensors"), tiny_tensors(tiny_config())

    for name, tensor in original.items():
        assert converted[name].dtype is torch.float32
        # Eight bits in blocks of 32: half a step of a 127th of the block's largest value.
        assert float((converted[name] - tensor).abs().max()) <= float(tensor.abs().max()) / 127, name


def test_a_converted_folder_is_complete_and_has_the_models_configuration(tmp_path: Path) -> None:
    convert_gguf(write_tiny_gguf(tmp_path / "m.gguf"), tmp_path / "m")

    check_model_folder(tmp_path / "m")
    assert load_model_config(tmp_path / "m") == tiny_config()
    tokenizer_config = json.loads((tmp_path / "m" / "tokenizer_config.json").read_text())
    assert tokenizer_config["chat_template"] == CHAT_TEMPLATE
    assert tokenizer_config["eos_token"] == "<|im_end|>"


def test_the_converted_tokenizer_merges_splits_digits_and_knows_special_tokens(tmp_path: Path) -> None:
    convert_gguf(write_tiny_gguf(tmp_path / "m.gguf"), tmp_path / "m")
    tokenizer = Tokenizer.from_file(str(tmp_path / "m" / "tokenizer.json"))

    assert tokenizer.encode("in the 42<|im_end|>").tokens == ["in", "Ġthe", "Ġ", "4", "2", "<|im_end|>"]
    assert tokenizer.encode("<|im_start|>").ids == [1]
    text = "naïve 你好 42\n\tthe end"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_a_file_is_converted_once_and_found_again_by_its_content(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "m.gguf")
    folder = resolve_model(str(path), tmp_path / "cache")
    written = (folder / "model.safetensors").stat().st_mtime_ns
    renamed = path.rename(tmp_path / "other.gguf")

    again = resolve_model(str(renamed), tmp_path / "cache")
    different = resolve_model(str(write_tiny_gguf(path, seed=1)), tmp_path / "cache")

    assert again == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == written
    assert different != folder


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"general.architecture": "qwen2"}, "architecture 'qwen2' is not supported"),
        ({"tokenizer.ggml.model": "llama"}, "tokenizer 'llama' is not supported"),
        ({"tokenizer.ggml.pre": "tekken"}, "pre-tokenizer 'tekken' is not supported"),
        ({"llama.rope.scaling.type": "yarn"}, "rope scaling 'yarn' is not supported"),
    ],
)
def test_a_model_of_another_kind_is_refused_by_file_and_reason(
    tmp_path: Path, fields: dict[str, str], problem: str
) -> None:
    path = write_tiny_gguf(tmp_path / "m.gguf", fields=fields)

    with pytest.raises(ModelFileError, match=f"m.gguf: {problem}"):
        convert_gguf(path, tmp_path / "m")


def test_a_damaged_file_is_refused_and_leaves_nothing_behind(tmp_path: Path) -> None:
    whole = write_tiny_gguf(tmp_path / "whole.gguf").read_bytes()
    for name, contents in {"cut": whole[: len(whole) // 2], "head": whole[:40], "text": b"hello", "none": b""}.items():
        path = tmp_path / f"{name}.gguf"
        path.write_bytes(contents)

        with pytest.raises(ModelFileError, match=f"{name}.gguf: is damaged or not a GGUF file"):
            convert_gguf(path, tmp_path / "models" / name)

    assert list((tmp_path / "models").iterdir()) == []
