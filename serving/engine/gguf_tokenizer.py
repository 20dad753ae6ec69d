"""The tokenizer inside a GGUF file, as the files of a Hugging Face folder.

Only byte-level BPE: GGUF stores a SentencePiece vocabulary without its merges, and inventing them
could split a text differently from the model's training. Such a model is refused by name.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from serving.engine.errors import ModelFileError

_CONTROL_TOKEN = 3
_USER_DEFINED_TOKEN = 4

_LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def make_tokenizer(path: Path, fields: Mapping[str, Any]) -> Tokenizer:
    """Build the tokenizer from the `tokenizer.ggml.*` fields of `path`.

    Raises:
        ModelFileError: not byte-level BPE, an unknown pre-tokenizer, or a field is missing.
    """
    kind = fields.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise ModelFileError(path, f"tokenizer {kind!r} is not supported (only 'gpt2', byte-level BPE)")
    try:
        tokens: Sequence[str] = fields["tokenizer.ggml.tokens"]
        token_types: Sequence[int] = fields["tokenizer.ggml.token_type"]
        merges: Sequence[str] = fields["tokenizer.ggml.merges"]
    except KeyError as error:
        raise ModelFileError(path, f"has no {error.args[0]}") from error
    # A merge's two parts are joined by one space; byte-level tokens themselves contain none.
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=pairs))
    tokenizer.pre_tokenizer = _make_pre_tokenizer(path, fields.get("tokenizer.ggml.pre", "default"))
    tokenizer.decoder = decoders.ByteLevel()
    for token, token_type in zip(tokens, token_types, strict=True):
        if token_type in {_CONTROL_TOKEN, _USER_DEFINED_TOKEN}:
            is_special = token_type == _CONTROL_TOKEN
            tokenizer.add_tokens([AddedToken(token, normalized=False, special=is_special)])
    return tokenizer


def make_tokenizer_config(fields: Mapping[str, Any], max_position: int) -> dict[str, object]:
    """The contents of `tokenizer_config.json`: special tokens by text, chat template."""
    tokens: Sequence[str] = fields["tokenizer.ggml.tokens"]
    document: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_position,
        "clean_up_tokenization_spaces": False,
        "add_bos_token": bool(fields.get("tokenizer.ggml.add_bos_token", False)),
    }
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    for name, ggml_name in names.items():
        token_id = fields.get(f"tokenizer.ggml.{ggml_name}_token_id")
        if token_id is not None:
            document[name] = tokens[token_id]
    if template := fields.get("tokenizer.chat_template"):
        document["chat_template"] = template
    return document


def _make_pre_tokenizer(path: Path, name: str) -> pre_tokenizers.PreTokenizer:
    match name:
        case "smollm":
            digits = pre_tokenizers.Digits(individual_digits=True)
            return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
        case "default" | "gpt-2":
            return pre_tokenizers.ByteLevel(add_prefix_space=False)
        case "llama-bpe" | "llama3":
            split = pre_tokenizers.Split(Regex(_LLAMA3_PATTERN), behavior="isolated")
            return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
        case _:
            raise ModelFileError(path, f"pre-tokenizer {name!r} is not supported; use the model's folder instead")
