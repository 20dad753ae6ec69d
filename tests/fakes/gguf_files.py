"""Writes a tiny model as a GGUF file, laid out as llama.cpp's converter does."""

from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
import torch
from tokenizers import pre_tokenizers

from tests.fakes.tiny_model import CHAT_TEMPLATE, tiny_config, tiny_tensors

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = ("Ġ t", "h e", "Ġt he", "i n")
_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "embed_tokens": "token_embd",
    "norm": "output_norm",
}


def write_tiny_gguf(
    path: Path, seed: int = 0, *, is_quantized: bool = False, fields: Mapping[str, str] | None = None
) -> Path:
    """Write the tiny model of `seed`; `fields` replace or add string fields by their GGUF names."""
    config = tiny_config()
    texts = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        **(fields or {}),
    }
    writer = gguf.GGUFWriter(path, texts.pop("general.architecture"))
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_position)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    _add_tokenizer(writer, config.vocab_size)
    for name, text in texts.items():
        writer.add_string(name, text)
    heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}
    for name, tensor in tiny_tensors(config, seed).items():
        _add_tensor(writer, name, tensor, heads, is_quantized=is_quantized)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tokenizer(writer: gguf.GGUFWriter, vocab_size: int) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merged = [merge.replace(" ", "") for merge in MERGES]
    tokens = [*SPECIAL_TOKENS, *alphabet, *merged]
    tokens += [f"[unused {n}]" for n in range(vocab_size - len(tokens))]
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIAL_TOKENS) + [1] * (vocab_size - len(SPECIAL_TOKENS)))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template(CHAT_TEMPLATE)


def _add_tensor(
    writer: gguf.GGUFWriter, name: str, tensor: torch.Tensor, heads: dict[str, int], *, is_quantized: bool
) -> None:
    prefix, _, kind = name.removesuffix(".weight").removeprefix("model.").rpartition("layers.")
    number, _, kind = kind.partition(".") if prefix or name.startswith("model.layers") else ("", "", kind)
    short = _NAMES[kind]
    values: npt.NDArray[np.float32] = tensor.numpy()
    if short in heads:
        rows, columns = values.shape
        by_half = values.reshape(heads[short], 2, rows // heads[short] // 2, columns)
        values = np.ascontiguousarray(by_half.swapaxes(1, 2).reshape(rows, columns))
    full_name = f"blk.{number}.{short}.weight" if number else f"{short}.weight"
    if is_quantized and values.ndim == 2:
        kind_of_values = gguf.GGMLQuantizationType.Q8_0
        writer.add_tensor(full_name, gguf.quants.quantize(values, kind_of_values), raw_dtype=kind_of_values)
    else:
        writer.add_tensor(full_name, values)
