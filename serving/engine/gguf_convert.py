"""Turns a GGUF file of a Llama-family model into a Hugging Face folder in float32, once.

Quantised tensors are dequantised: the engine computes in float32 or bfloat16. The folder appears
whole or not at all: it is written under a temporary name and renamed.
"""

import json
import struct
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file
from tqdm import tqdm

from serving.engine.errors import ModelFileError
from serving.engine.gguf_tokenizer import make_tokenizer, make_tokenizer_config
from serving.engine.model_folder import (
    CONFIG_FILE,
    GENERATION_CONFIG_FILE,
    TOKENIZER_CONFIG_FILE,
    TOKENIZER_FILE,
    WEIGHTS_FILE,
    check_model_folder,
    record_weight_hashes,
)

_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def convert_gguf(path: Path, target: Path, *, show_progress: bool = False) -> None:
    """Write the folder `target` from the GGUF file `path`; does nothing if another process was faster.

    Raises:
        ModelFileError: the file is damaged, or not a Llama-family model that the engine can run.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".convert-", dir=target.parent) as temporary:
        folder = Path(temporary) / target.name
        folder.mkdir()
        try:
            _write_folder(path, folder, show_progress=show_progress)
        except (OSError, ValueError, IndexError, KeyError, struct.error) as error:
            # The reader has no errors of its own: a truncated or foreign file surfaces as any of these.
            raise ModelFileError(path, f"is damaged or not a GGUF file ({type(error).__name__}: {error})") from error
        check_model_folder(folder)
        record_weight_hashes(folder)
        try:
            folder.rename(target)
        except OSError:
            if not target.is_dir():
                raise


def _write_folder(path: Path, folder: Path, *, show_progress: bool) -> None:
    reader = gguf.GGUFReader(path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    config = _make_config(path, fields)
    tokenizer_config = make_tokenizer_config(fields, int(fields["llama.context_length"]))
    make_tokenizer(path, fields).save(str(folder / TOKENIZER_FILE))
    tensors: dict[str, npt.NDArray[np.float32]] = {}
    for tensor in tqdm(reader.tensors, desc=f"converting {path.name}", unit="tensor", disable=not show_progress):
        name = _tensor_name(path, tensor.name)
        values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        if name.endswith("q_proj.weight"):
            values = _unpermute(values, int(fields["llama.attention.head_count"]))
        elif name.endswith("k_proj.weight"):
            values = _unpermute(values, int(fields["llama.attention.head_count_kv"]))
        tensors[name] = np.ascontiguousarray(values)
    config["vocab_size"] = len(tensors["model.embed_tokens.weight"])
    config["tie_word_embeddings"] = "lm_head.weight" not in tensors
    save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    generation: dict[str, object] = {
        key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in config
    }
    _write_json(folder / CONFIG_FILE, config)
    _write_json(folder / GENERATION_CONFIG_FILE, generation)
    _write_json(folder / TOKENIZER_CONFIG_FILE, tokenizer_config)


def _make_config(path: Path, fields: Mapping[str, Any]) -> dict[str, object]:
    architecture = fields.get("general.architecture")
    if architecture != "llama":
        raise ModelFileError(path, f"architecture {architecture!r} is not supported (only 'llama')")
    if fields.get("llama.rope.scaling.type", "none") != "none":
        raise ModelFileError(path, f"rope scaling {fields['llama.rope.scaling.type']!r} is not supported")
    num_heads = int(fields["llama.attention.head_count"])
    hidden_size = int(fields["llama.embedding_length"])
    config: dict[str, object] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "dtype": "float32",
        "num_hidden_layers": int(fields["llama.block_count"]),
        "hidden_size": hidden_size,
        "intermediate_size": int(fields["llama.feed_forward_length"]),
        "num_attention_heads": num_heads,
        "num_key_value_heads": int(fields["llama.attention.head_count_kv"]),
        "head_dim": int(fields.get("llama.rope.dimension_count", hidden_size // num_heads)),
        "max_position_embeddings": int(fields["llama.context_length"]),
        "rope_theta": _shortest(fields.get("llama.rope.freq_base", 10000.0)),
        "rms_norm_eps": _shortest(fields["llama.attention.layer_norm_rms_epsilon"]),
    }
    for name, ggml_name in {"bos": "bos", "eos": "eos", "pad": "padding"}.items():
        token_id = fields.get(f"tokenizer.ggml.{ggml_name}_token_id")
        if token_id is not None:
            config[f"{name}_token_id"] = int(token_id)
    return config


def _tensor_name(path: Path, name: str) -> str:
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[3] == "weight" and parts[2] in _LAYER_NAMES:
        return f"model.layers.{int(parts[1])}.{_LAYER_NAMES[parts[2]]}.weight"
    raise ModelFileError(path, f"tensor {name!r} is not part of a plain Llama model")


def _unpermute(values: npt.NDArray[np.float32], num_heads: int) -> npt.NDArray[np.float32]:
    """Put the rows of q or k back: GGUF interleaves the two halves of each head for its own rope."""
    num_rows, num_columns = values.shape
    by_pair = values.reshape(num_heads, num_rows // num_heads // 2, 2, num_columns)
    return by_pair.swapaxes(1, 2).reshape(num_rows, num_columns)


def _shortest(value: float) -> float:
    """The shortest decimal of a float32: 1e-05 rather than 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _write_json(path: Path, document: Mapping[str, object]) -> None:
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
