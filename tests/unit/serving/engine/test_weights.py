import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from configs import DTypeName
from serving.engine.errors import ModelFileError
from serving.engine.linear import cpu_has_bfloat16
from serving.engine.runner import Engine
from serving.engine.weights import load_weights, make_weights, resolve_dtype
from tests.fakes.engine_rows import GROUP, HandFedSequence, run_in_chunks
from tests.fakes.tiny_model import TinyModel, make_tiny_model, tiny_config, tiny_tensors, write_tiny_model


def _last_logits(model: TinyModel) -> torch.Tensor:
    engine = Engine(model.config, model.weights, {GROUP: model.make_pool(4)}, exact=False)
    return run_in_chunks(engine, HandFedSequence("a", range(40), [0, 1, 2]), chunk=40)


@pytest.mark.parametrize("tie_embeddings", [True, False])
def test_a_folder_loads_to_the_weights_it_was_written_from(tmp_path: Path, tie_embeddings: bool) -> None:
    config = tiny_config(tie_embeddings=tie_embeddings)
    write_tiny_model(tmp_path, tie_embeddings=tie_embeddings)

    loaded = TinyModel(config, load_weights(tmp_path, config, torch.float32, "cpu"))

    assert torch.equal(_last_logits(loaded), _last_logits(make_tiny_model(tie_embeddings=tie_embeddings)))


def test_a_sharded_folder_loads_like_a_single_file(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    names = sorted(tensors)
    shards = {"one.safetensors": names[::2], "two.safetensors": names[1::2]}
    for file, of_shard in shards.items():
        save_file({name: tensors[name] for name in of_shard}, tmp_path / file)
    weight_map = {name: file for file, of_shard in shards.items() for name in of_shard}
    (tmp_path / "model.safetensors.index.json").write_text(f'{{"weight_map": {weight_map!r}}}'.replace("'", '"'))

    loaded = TinyModel(tiny_config(), load_weights(tmp_path, tiny_config(), torch.float32, "cpu"))

    assert torch.equal(_last_logits(loaded), _last_logits(make_tiny_model()))


def test_a_missing_tensor_is_named_with_its_file(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)

    with pytest.raises(ModelFileError, match=r"model.safetensors: has no tensor 'model.layers.2.input_layernorm"):
        load_weights(tmp_path, tiny_config(num_layers=3), torch.float32, "cpu")


def test_a_tensor_of_another_shape_is_named_with_both_shapes(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)

    with pytest.raises(ModelFileError, match=r"gate_proj.weight' has shape \(160, 64\), config.json says \(128, 64\)"):
        load_weights(tmp_path, tiny_config(intermediate_size=128), torch.float32, "cpu")


@pytest.mark.parametrize("damage", ["truncated", "no header", "empty"])
def test_a_damaged_weight_file_is_refused_by_name(tmp_path: Path, damage: str) -> None:
    write_tiny_model(tmp_path)
    path = tmp_path / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes({"truncated": whole[:-100], "no header": struct.pack("<Q", 1 << 40), "empty": b""}[damage])

    with pytest.raises(ModelFileError, match=r"model.safetensors: is damaged or not a safetensors file"):
        load_weights(tmp_path, tiny_config(), torch.float32, "cpu")


def test_tensors_in_memory_are_checked_too() -> None:
    tensors = tiny_tensors(tiny_config())
    tensors["model.norm.weight"] = torch.ones(3)

    with pytest.raises(ValueError, match=r"'model.norm.weight' has shape \(3,\), expected \(64,\)"):
        make_weights(tiny_config(), tensors, torch.float32, "cpu")


def test_auto_is_bfloat16_exactly_where_the_cpu_multiplies_it() -> None:
    expected = torch.bfloat16 if cpu_has_bfloat16() else torch.float32

    assert resolve_dtype(DTypeName.AUTO, "cpu") is expected
    assert resolve_dtype(DTypeName.FLOAT32, "cpu") is torch.float32
    assert resolve_dtype(DTypeName.BFLOAT16, "cpu") is torch.bfloat16
