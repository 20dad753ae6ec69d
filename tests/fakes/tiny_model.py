"""Small Llama models with seeded random weights: in memory for the engine, or as a folder on disk."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from configs import KernelSet, ModelConfig
from serving.engine.weights import ModelWeights, PackedWeights, make_weights

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


_TINY = ModelConfig(
    num_layers=2,
    hidden_size=64,
    intermediate_size=160,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=300,
    max_position=1024,
    rope_theta=10000.0,
    rms_norm_eps=1e-5,
    tie_embeddings=True,
    bos_token_id=1,
    eos_token_ids=(2,),
)


def tiny_config(**changes: Any) -> ModelConfig:
    """Two layers, four query heads on two KV heads, 300 tokens; `changes` replace fields."""
    return replace(_TINY, **changes)


def tiny_tensors(config: ModelConfig, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random float32 tensors under the names of a Llama checkpoint; logits spread over a few units."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        values: torch.Tensor = torch.randn(*shape, generator=generator) * shape[-1] ** -0.5
        return values

    hidden, intermediate = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    tensors = {
        "model.embed_tokens.weight": random(config.vocab_size, hidden) * 4,
        "model.norm.weight": 1 + 0.1 * torch.randn(hidden, generator=generator),
    }
    if not config.tie_embeddings:
        tensors["lm_head.weight"] = random(config.vocab_size, hidden) * 4
    for n in range(config.num_layers):
        shapes = {
            "self_attn.q_proj": (q_size, hidden),
            "self_attn.k_proj": (kv_size, hidden),
            "self_attn.v_proj": (kv_size, hidden),
            "self_attn.o_proj": (hidden, q_size),
            "mlp.gate_proj": (intermediate, hidden),
            "mlp.up_proj": (intermediate, hidden),
            "mlp.down_proj": (hidden, intermediate),
        }
        for name, shape in shapes.items():
            tensors[f"model.layers.{n}.{name}.weight"] = random(*shape) * 2
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{n}.{name}.weight"] = 1 + 0.1 * torch.randn(hidden, generator=generator)
    return tensors


@dataclass(frozen=True, slots=True)
class TinyModel:
    """A configuration and its weights, ready for an engine."""

    config: ModelConfig
    weights: ModelWeights | PackedWeights

    def make_pool(self, num_slots: int, tokens_per_block: int = 16, fill: float = float("nan")) -> torch.Tensor:
        """A pool of all layers; unwritten memory holds `fill`, so that reading it shows."""
        config = self.config
        shape = (num_slots, config.num_layers, 2, config.num_kv_heads, tokens_per_block, config.head_dim)
        return torch.full(shape, fill, dtype=self.weights.dtype)


def make_tiny_model(
    dtype: torch.dtype = torch.float32, seed: int = 0, kernels: KernelSet = KernelSet.AUTO, **changes: Any
) -> TinyModel:
    """A tiny model in memory."""
    config = tiny_config(**changes)
    return TinyModel(config, make_weights(config, tiny_tensors(config, seed), dtype, "cpu", kernels))


def write_tiny_model(folder: Path, seed: int = 0, **changes: Any) -> Path:
    """Write a tiny model as a Hugging Face folder: weights, config, byte-level tokenizer, chat template."""
    config = tiny_config(**changes)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tiny_tensors(config, seed), folder / "model.safetensors", metadata={"format": "pt"})
    documents: dict[str, dict[str, object]] = {
        "config.json": {
            **_family(config),
            "hidden_act": "silu",
            "dtype": "float32",
            "num_hidden_layers": config.num_layers,
            "hidden_size": config.hidden_size,
            "intermediate_size": config.intermediate_size,
            "num_attention_heads": config.num_heads,
            "num_key_value_heads": config.num_kv_heads,
            "head_dim": config.head_dim,
            "vocab_size": config.vocab_size,
            "max_position_embeddings": config.max_position,
            "rope_theta": config.rope_theta,
            "rms_norm_eps": config.rms_norm_eps,
            "tie_word_embeddings": config.tie_embeddings,
            "bos_token_id": config.bos_token_id,
            "eos_token_id": config.eos_token_ids[0],
        },
        "generation_config.json": {"eos_token_id": list(config.eos_token_ids)},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<|im_start|>",
            "eos_token": "<|im_end|>",
            "chat_template": CHAT_TEMPLATE,
        },
    }
    for name, document in documents.items():
        (folder / name).write_text(json.dumps(document), encoding="utf-8")
    _byte_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def _family(config: ModelConfig) -> dict[str, object]:
    """Llama, or, where a layer has a window, the family that differs in nothing else."""
    windows = {window for window in config.layer_windows if window is not None}
    if not windows:
        return {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    (window,) = windows
    family: dict[str, object] = {
        "architectures": ["MinistralForCausalLM"],
        "model_type": "ministral",
        "sliding_window": window,
        "layer_types": ["full_attention" if each is None else "sliding_attention" for each in config.layer_windows],
    }
    return family | ({"num_sink_tokens": config.num_sink_tokens} if config.num_sink_tokens else {})


def _byte_tokenizer() -> Tokenizer:
    """Three special tokens, then one token per byte: ids 0 to 258."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: token_id for token_id, token in enumerate([*_SPECIAL_TOKENS, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=True) for token in _SPECIAL_TOKENS])
    return tokenizer
