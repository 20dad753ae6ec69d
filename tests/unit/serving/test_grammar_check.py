"""Grammars are tried in a process that may die of them: the door only says what became of it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from serving.grammar import MAX_GRAMMAR_CHARACTERS, GrammarError, json_grammar
from serving.grammar_check import GrammarChecker
from serving.tokenizer import Tokenizer
from tests.fakes.tiny_tokenizer import EOS_TOKEN_ID

FINE = json_grammar({"type": "array", "items": {"enum": [1, 2]}})
LONG = json_grammar({"type": "integer", "multipleOf": 100_000_007})
WIDE = json_grammar({"allOf": [{"type": "string", "pattern": f".*a.{{{n}}}b.*"} for n in range(5, 30)]})


@pytest.fixture
def checker(tiny_folder: Path) -> Iterator[GrammarChecker]:
    checker = GrammarChecker(Tokenizer.load(tiny_folder).document, 410, (EOS_TOKEN_ID,))
    yield checker
    checker.close()


def _children() -> set[int]:
    return {child.pid for child in psutil.Process().children()}


@pytest.mark.parametrize("costly", [LONG, WIDE], ids=["multipleOf", "allOf"])
def test_a_grammar_that_costs_too_much_is_refused_and_the_next_is_served(checker: GrammarChecker, costly: str) -> None:
    checker.check(FINE)
    with pytest.raises(GrammarError, match="takes too long or too much memory"):
        checker.check(costly)
    checker.check(json_grammar({"type": "null"}))


def test_one_process_checks_every_grammar_until_it_is_closed(checker: GrammarChecker) -> None:
    before = _children()
    checker.check(FINE)
    started = _children() - before
    assert len(started) == 1
    checker.check(json_grammar({"type": "null"}))
    assert _children() - before == started
    checker.close()
    checker.close()
    assert _children() == before


def test_a_verdict_is_remembered(checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch) -> None:
    checker.check(FINE)
    with pytest.raises(GrammarError):
        checker.check(LONG)
    monkeypatch.setattr(checker, "_ask", lambda _: pytest.fail("it was asked again"))
    checker.check(FINE)
    with pytest.raises(GrammarError, match="too long"):
        checker.check(LONG)


@pytest.mark.parametrize(
    "schema", [{"type": "string", "pattern": "("}, {"$ref": "#"}, {"enum": ["x" * MAX_GRAMMAR_CHARACTERS]}]
)
def test_what_no_token_can_begin_is_refused(checker: GrammarChecker, schema: dict[str, Any]) -> None:
    with pytest.raises(GrammarError):
        checker.check(json_grammar(schema))


def test_a_process_that_cannot_start_is_no_verdict() -> None:
    with pytest.raises(RuntimeError, match="does not start"):
        GrammarChecker("no tokenizer", 410, (EOS_TOKEN_ID,)).check(FINE)
