"""Bytes of tokens, for every kind of decoder that is served."""

import pytest
from tokenizers import Tokenizer as HFTokenizer
from tokenizers import decoders, models

from serving.token_bytes import TokenBytes, UnsupportedTokenizerError, byte_level_alphabet

_SENTENCE_PIECES = {"<unk>": 0, "▁Hello": 1, "▁wor": 2, "ld": 3, "▁": 4, "<0xE4>": 5, "<0xB8>": 6, "<0xAD>": 7}


def sentence_piece() -> HFTokenizer:
    tokenizer = HFTokenizer(models.BPE(vocab=_SENTENCE_PIECES, merges=[], byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>"])
    return tokenizer


def test_the_byte_level_alphabet_names_every_byte_once() -> None:
    assert sorted(byte_level_alphabet().values()) == list(range(256))


@pytest.mark.parametrize("ids", [[1, 2, 3], [2, 3, 1], [4, 1], [5, 6, 7, 2], [1, 5, 6, 7], [0, 1], []])
def test_byte_fallback_text_is_the_librarys(ids: list[int]) -> None:
    tokenizer = sentence_piece()
    assert TokenBytes.of(tokenizer).text(ids) == tokenizer.decode(ids)


def test_ids_without_a_token_are_no_text() -> None:
    pieces = TokenBytes({1: b"a"}, frozenset(), strips_leading_space=False)
    assert pieces.text([5, 1, 10**9]) == "a"


def test_an_unknown_decoder_is_refused_by_name() -> None:
    tokenizer = HFTokenizer(models.BPE())
    tokenizer.decoder = decoders.WordPiece()
    with pytest.raises(UnsupportedTokenizerError, match="WordPiece"):
        TokenBytes.of(tokenizer)
    tokenizer.decoder = None
    with pytest.raises(UnsupportedTokenizerError, match="none"):
        TokenBytes.of(tokenizer)
