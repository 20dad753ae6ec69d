"""`TokenBytes`: the bytes that each token of a vocabulary stands for.

Working in bytes, not in text, makes incremental decoding exact: a character may be spread over tokens,
but its bytes are only ever appended. Knows the two decoders that byte-pair models use (byte-level, and
SentencePiece with byte fallback) and refuses every other by name, rather than guess where spaces go.
"""

import json
import re
from collections.abc import Mapping, Sequence

from tokenizers import Tokenizer as HFTokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_META_SPACE = "▁"


class UnsupportedTokenizerError(ValueError):
    """The tokenizer's decoder is not one that can be undone byte by byte."""


class TokenBytes:
    """Bytes by token id.

    Attributes:
        strips_leading_space: the decoder drops one space at the start of a whole text.
        longest: length of the longest token in bytes; at least 1.
    """

    __slots__ = ("_pieces", "_special", "longest", "strips_leading_space")

    def __init__(self, pieces: Mapping[int, bytes], special: frozenset[int], *, strips_leading_space: bool) -> None:
        """Args.

        pieces: bytes of every token, special ones included.
        special: ids that are not part of a generated text.
        strips_leading_space: see the class.
        """
        self._pieces = dict(pieces)
        self._special = special
        self.strips_leading_space = strips_leading_space
        self.longest = max((len(piece) for piece in self._pieces.values()), default=1) or 1

    @classmethod
    def of(cls, tokenizer: HFTokenizer) -> "TokenBytes":
        """Read the vocabulary. Raises UnsupportedTokenizerError for an unknown kind of decoder."""
        kinds = _decoder_kinds(tokenizer)
        vocabulary: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
        special = frozenset(i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special)
        if kinds == ["ByteLevel"]:
            alphabet = byte_level_alphabet()
            pieces = {i: _byte_level_piece(token, alphabet) for token, i in vocabulary.items()}
            return cls(pieces, special, strips_leading_space=False)
        if kinds in (["Replace", "ByteFallback", "Fuse"], ["Replace", "ByteFallback", "Fuse", "Strip"], ["Metaspace"]):
            pieces = {i: _sentence_piece(token) for token, i in vocabulary.items()}
            return cls(pieces, special, strips_leading_space=kinds[-1] in ("Strip", "Metaspace"))
        msg = f"tokenizer decoder {kinds or 'none'} is not supported: use a byte-level or byte-fallback tokenizer"
        raise UnsupportedTokenizerError(msg)

    def piece(self, token_id: int) -> bytes:
        """Bytes of a token in a generated text: empty for special tokens and for ids without a token."""
        if token_id in self._special:
            return b""
        return self._pieces.get(token_id, b"")

    def verbatim_piece(self, token_id: int) -> bytes:
        """Bytes of a token as it is written, special or not; empty for ids without a token."""
        return self._pieces.get(token_id, b"")

    def text(self, token_ids: Sequence[int]) -> str:
        """A whole text, special tokens left out and invalid UTF-8 replaced."""
        return self._to_text(b"".join(map(self.piece, token_ids)))

    def verbatim_text(self, token_ids: Sequence[int]) -> str:
        """A whole text with its special tokens written out."""
        return self._to_text(b"".join(self.verbatim_piece(token_id) for token_id in token_ids))

    def _to_text(self, raw: bytes) -> str:
        text = raw.decode("utf-8", errors="replace")
        return text.removeprefix(" ") if self.strips_leading_space else text


def byte_level_alphabet() -> dict[str, int]:
    """The printable character that GPT-2's byte-level encoding gives each byte: character -> byte."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    shifted = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(256 + rank): byte for rank, byte in enumerate(shifted)})
    return alphabet


def _byte_level_piece(token: str, alphabet: Mapping[str, int]) -> bytes:
    try:
        return bytes(alphabet[character] for character in token)
    except KeyError:
        # An added token, kept as it was written.
        return token.encode()


def _sentence_piece(token: str) -> bytes:
    if byte := _BYTE_TOKEN.fullmatch(token):
        return bytes([int(byte.group(1), 16)])
    return token.replace(_META_SPACE, " ").encode()


def _decoder_kinds(tokenizer: HFTokenizer) -> list[str]:
    decoder = json.loads(tokenizer.to_str())["decoder"]
    if decoder is None:
        return []
    parts = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    return [part["type"] for part in parts]
