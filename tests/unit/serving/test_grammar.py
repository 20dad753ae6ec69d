"""Grammars over a tiny vocabulary: what may follow, where an output may end, and what is refused."""

from pathlib import Path

import pytest

from serving.grammar import MAX_GRAMMAR_CHARACTERS, GrammarCompiler, GrammarError, calls_grammar, json_grammar
from serving.tokenizer import Tokenizer
from tests.fakes.tiny_tokenizer import EOS_TOKEN_ID

VOCAB_SIZE = 410
SCHEMA = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}


@pytest.fixture
def tokenizer(tiny_folder: Path) -> Tokenizer:
    return Tokenizer.load(tiny_folder)


@pytest.fixture
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer.document, VOCAB_SIZE, (EOS_TOKEN_ID, 0))


def _follows(compiler: GrammarCompiler, tokenizer: Tokenizer, grammar: str, text: str) -> bool:
    """Whether `text` may be written token by token, and then be the whole output."""
    state = compiler.start(grammar)
    for token_id in tokenizer.encode(text):
        if not state.allowed()[token_id]:
            return False
        state.read([token_id])
    return bool(state.allowed()[EOS_TOKEN_ID])


@pytest.mark.parametrize(
    ("text", "fits"),
    [('{"n": 1}', True), ('{"n":2}', True), ('{\n  "n" : 1\n}', True), ('{"n": 3}', False), ("{}", False), ("1", False),
     ('{"n":' + " " * 30 + "1}", False), ('{"n": 1', False)],
)  # fmt: skip
def test_only_documents_of_the_schema_may_be_written(
    compiler: GrammarCompiler, tokenizer: Tokenizer, text: str, fits: bool
) -> None:
    assert _follows(compiler, tokenizer, json_grammar(SCHEMA), text) == fits


def test_every_end_of_sequence_token_may_end_a_complete_output_and_nothing_else_follows(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    state = compiler.start(json_grammar(SCHEMA))
    assert not state.allowed()[[EOS_TOKEN_ID, 0]].any()
    state.read(tokenizer.encode('{"n": 1}'))
    assert state.allowed().nonzero()[0].tolist() == [0, EOS_TOKEN_ID]
    state.read([EOS_TOKEN_ID])
    assert state.allowed().nonzero()[0].tolist() == [0, EOS_TOKEN_ID]
    assert len(state.allowed()) == VOCAB_SIZE


def test_a_token_that_may_not_follow_is_an_error(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    state = compiler.start(json_grammar(SCHEMA))
    with pytest.raises(GrammarError):
        state.read(tokenizer.encode("x"))


def test_calls_are_those_of_the_tools(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    grammar = calls_grammar({"f": SCHEMA, "g-2": {"type": "object"}}, begin="<c>\n", end="\n</c>", max_calls=2)
    call = '<c>\n{"name": "f", "arguments": {"n": 1}}\n</c>'
    other = '<c>\n{"name": "g-2", "arguments": {"any": []}}\n</c>'
    assert _follows(compiler, tokenizer, grammar, call)
    assert _follows(compiler, tokenizer, grammar, f"{call}\n{other}")
    assert not _follows(compiler, tokenizer, grammar, f"{call}\n{other}\n{call}")
    assert not _follows(compiler, tokenizer, grammar, call.replace('"f"', '"g-2"').replace('{"n": 1}', "5"))
    assert not _follows(compiler, tokenizer, grammar, "no call")


@pytest.mark.parametrize(
    "schema",
    [{"type": "nothing"}, [], {"$ref": "#/definitions/none"}, {"type": "string", "pattern": "("}, {"enum": []}],
)
def test_what_is_no_schema_is_refused(compiler: GrammarCompiler, schema: object) -> None:
    with pytest.raises(GrammarError):
        compiler.check(json_grammar(schema))


def test_a_grammar_that_is_too_long_is_refused(compiler: GrammarCompiler) -> None:
    with pytest.raises(GrammarError, match="characters"):
        compiler.check(json_grammar({"enum": ["x" * MAX_GRAMMAR_CHARACTERS]}))
