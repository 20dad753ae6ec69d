"""How logprobs are worded: parallel lists in completions, one object per token in chats.

A token is shown as it was written, special ones included; one that is no whole character is shown by its
bytes, so that two different tokens are never shown alike.
"""

import codecs
from collections.abc import Sequence
from dataclasses import dataclass

from scheduler.spec import TokenLogprobs
from serving.stream import ScoredToken
from serving.token_bytes import TokenBytes

_LEAST = -9999.0
"""Stands for the logarithm of no probability at all, which JSON cannot write."""


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt that is repeated before what was generated.

    Attributes:
        text: empty without `echo`.
        token_ids: of the prompt.
        offsets: characters of `text` before each token; empty where no logprobs are asked for.
    """

    text: str = ""
    token_ids: tuple[int, ...] = ()
    offsets: tuple[int, ...] = ()


def make_echo(token_bytes: TokenBytes, text: str, token_ids: Sequence[int]) -> Echo:
    """An echo with the place of every token in its text."""
    pieces = [token_bytes.verbatim_piece(token_id) for token_id in token_ids]
    if token_bytes.verbatim_text(token_ids) != text:
        # Special tokens that the tokenizer added are no part of the text.
        pieces = [token_bytes.piece(token_id) for token_id in token_ids]
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    offsets, num_characters = [], 0
    for piece in pieces:
        offsets.append(min(num_characters, len(text)))
        num_characters += len(decoder.decode(piece))
    return Echo(text, tuple(token_ids), tuple(offsets))


class LogprobWording:
    """Words the logprobs of one model's tokens."""

    def __init__(self, token_bytes: TokenBytes) -> None:
        """Take the vocabulary."""
        self._token_bytes = token_bytes

    def completion(
        self, scored: Sequence[ScoredToken], echo: Echo, prompt: Sequence[TokenLogprobs] | None
    ) -> dict[str, object]:
        """`logprobs` of a completion.

        Args:
            scored: generated tokens.
            echo: what comes before them in the text; its tokens are listed where `prompt` is given.
            prompt: of the prompt's tokens from the second on.
        """
        token_ids = [token.token_id for token in scored]
        offsets = [len(echo.text) + token.text_offset for token in scored]
        found: list[TokenLogprobs | None] = [token.logprobs for token in scored]
        if prompt is not None:
            token_ids = [*echo.token_ids, *token_ids]
            offsets = [*echo.offsets, *offsets]
            # Nothing comes before the first token, so nothing says how likely it was.
            found = [None, *prompt, *found]
        return {
            "tokens": [self._text(token_id, "bytes:") for token_id in token_ids],
            "token_logprobs": [None if one is None else _finite(one.logprob) for one in found],
            "top_logprobs": [
                None if one is None else self._alternatives(token_id, one)
                for token_id, one in zip(token_ids, found, strict=True)
            ],
            "text_offset": offsets,
        }

    def chat(self, scored: Sequence[ScoredToken]) -> dict[str, object]:
        """`logprobs` of a chat's choice."""
        content = [
            {
                **self._entry(token.token_id, token.logprobs.logprob),
                "top_logprobs": [self._entry(token_id, logprob) for token_id, logprob in token.logprobs.top],
            }
            for token in scored
        ]
        return {"content": content, "refusal": None}

    def _alternatives(self, token_id: int, found: TokenLogprobs) -> dict[str, float]:
        """By text; the token itself is always among them."""
        pairs = [*found.top, (token_id, found.logprob)]
        worded: dict[str, float] = {}
        for of_id, logprob in pairs:
            worded.setdefault(self._text(of_id, "bytes:"), _finite(logprob))
        return worded

    def _entry(self, token_id: int, logprob: float) -> dict[str, object]:
        raw = self._token_bytes.verbatim_piece(token_id)
        return {"token": self._text(token_id, ""), "logprob": _finite(logprob), "bytes": list(raw)}

    def _text(self, token_id: int, prefix: str) -> str:
        raw = self._token_bytes.verbatim_piece(token_id)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            return prefix + "".join(f"\\x{byte:02x}" for byte in raw)


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST)
