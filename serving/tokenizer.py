"""`Tokenizer`: text to token ids and back, from a Hugging Face folder, without transformers.

Gives the same ids as transformers for the same folder. Special tokens are added by `tokenizer.json`'s own
post-processor and by nothing else: `add_bos_token` and `add_eos_token` in the settings are for folders
without that file, and transformers ignores them beside it.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path

from tokenizers import Tokenizer as HFTokenizer

from serving.chat_template import ChatTemplate, ChatTemplateError
from serving.token_bytes import TokenBytes
from serving.tools import messages_with_tools

_SPECIAL_TOKEN_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


class TokenizerFileError(ValueError):
    """A tokenizer file is missing or damaged; the message names it."""


class Tokenizer:
    """Encoding, decoding and the chat template of one model. Holds no state between calls.

    Attributes:
        token_bytes: the vocabulary as bytes, for incremental decoding.
    """

    def __init__(self, backend: HFTokenizer, chat_template: ChatTemplate | None) -> None:
        """Use `load`; this takes finished parts."""
        self._backend = backend
        self._chat_template = chat_template
        self.token_bytes = TokenBytes.of(backend)
        swallows_space = any(token.lstrip or token.rstrip for token in backend.get_added_tokens_decoder().values())
        self._keeps_bytes = backend.normalizer is None and not swallows_space

    @classmethod
    def load(cls, folder: Path, now: Callable[[], datetime] = datetime.now) -> "Tokenizer":
        """Load `tokenizer.json` and `tokenizer_config.json`.

        Args:
            folder: a model in Hugging Face's layout.
            now: clock for chat templates that print the date.

        Raises:
            TokenizerFileError: a file is missing or damaged.
            ChatTemplateError: the chat template does not compile.
            UnsupportedTokenizerError: the vocabulary is of an unknown kind.
        """
        path = folder / "tokenizer.json"
        try:
            backend = HFTokenizer.from_str(path.read_text(encoding="utf-8"))
        except OSError as error:
            msg = f"{path}: {error.strerror}"
            raise TokenizerFileError(msg) from error
        except Exception as error:  # the library raises bare Exception for a damaged file
            msg = f"{path}: {error}"
            raise TokenizerFileError(msg) from error
        settings = _read_json(folder / "tokenizer_config.json")
        special_tokens = _special_tokens(settings, _read_json(folder / "special_tokens_map.json"))
        backend.no_truncation()
        backend.no_padding()
        source = _template_source(folder, settings)
        return cls(backend, ChatTemplate(source, special_tokens, now) if source else None)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`. May be called from any thread."""
        # Of the library's calls only the batch ones let other threads run.
        return list(self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)

    def min_tokens(self, text: str) -> int:
        """A lower bound of the number of tokens of `text`, found without tokenizing it.

        0 where the text may shrink before it is cut into tokens.
        """
        return len(text.encode()) // self.token_bytes.longest if self._keeps_bytes else 0

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of these ids, special tokens left out."""
        return self.token_bytes.text(token_ids)

    def decode_verbatim(self, token_ids: Sequence[int]) -> str:
        """The text of these ids with special tokens written out: a prompt as it was given."""
        return self.token_bytes.verbatim_text(token_ids)

    @property
    def has_chat_template(self) -> bool:
        """Whether the model can chat."""
        return self._chat_template is not None

    @property
    def document(self) -> str:
        """The `tokenizer.json` of this tokenizer."""
        return self._backend.to_str()

    def render_chat(self, messages: Sequence[Mapping[str, object]], tools: Sequence[Mapping[str, object]] = ()) -> str:
        """The prompt text of a conversation, ready for the assistant's turn.

        Args:
            messages: role, content, and the tool calls of earlier answers.
            tools: OpenAI's definitions; written into the messages where the template knows none.

        Raises:
            ChatTemplateError: there is no template, or it refuses the messages.
        """
        if self._chat_template is None:
            msg = "the model has no chat template"
            raise ChatTemplateError(msg)
        if self._chat_template.knows_tools:
            return self._chat_template.render(messages, tools)
        return self._chat_template.render(messages_with_tools(messages, tools))

    def encode_chat(self, messages: Sequence[Mapping[str, object]]) -> list[int]:
        """Token ids of a conversation. The template writes the special tokens itself. Raises ChatTemplateError."""
        return self.encode(self.render_chat(messages), add_special_tokens=False)


def _read_json(path: Path) -> dict[str, object]:
    if not path.is_file():
        return {}
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        msg = f"{path}: {error}"
        raise TokenizerFileError(msg) from error
    if not isinstance(document, dict):
        msg = f"{path}: expected an object, got {type(document).__name__}"
        raise TokenizerFileError(msg)
    return document


def _special_tokens(*documents: Mapping[str, object]) -> dict[str, str]:
    """Name -> text; the first document that has a name wins."""
    found: dict[str, str] = {}
    for document in documents:
        for name in _SPECIAL_TOKEN_NAMES:
            value = document.get(name)
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                found.setdefault(name, text)
    return found


def _template_source(folder: Path, settings: Mapping[str, object]) -> str | None:
    """The template's text: its own file first, then the settings (one text, or named ones)."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    value = settings.get("chat_template")
    if isinstance(value, list):
        named = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}
        value = named.get("default")
    return value if isinstance(value, str) else None
