"""Grammars: which tokens may follow, so that an output is JSON of a schema or a call of a tool.

A grammar travels as text (`SamplingParams.grammar`). Whoever draws builds its state from the generated tokens,
so that a resumed request goes on where it was, wherever that is. Parsing and masks are llguidance's, which is
imported when it is first used: a worker of bare weights, without a tokenizer, runs where it is not installed.
"""

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import llguidance
    from llguidance._lib import JsonCompileOptions  # a name of its stubs only

MAX_GRAMMAR_CHARACTERS = 200_000
# Free white space lets a weak model write nothing else until its limit; this much indents 20 columns.
_JSON_STYLE: "JsonCompileOptions" = {"whitespace_pattern": r"[ \t\n\r]{0,20}"}


class GrammarError(ValueError):
    """The grammar is not valid, or too complex; the message is for whoever wrote it."""


def json_grammar(schema: object) -> str:
    """The grammar of JSON documents that fit `schema`. Raises GrammarError."""
    import llguidance

    try:
        return llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults=_JSON_STYLE)
    except ValueError as error:
        raise GrammarError(str(error)) from error


def calls_grammar(tools: Mapping[str, object], *, begin: str, end: str, max_calls: int) -> str:
    """The grammar of one or more tool calls, each as JSON between two marks, on lines of their own.

    Args:
        tools: name -> JSON schema of the arguments; names of letters, digits, `_` and `-`.
        begin: the line before a call.
        end: the line after it.
        max_calls: how many at most.
    """
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, "arguments": parameters},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for name, parameters in tools.items()
    ]
    more = f' ("\\n" call){{0,{max_calls - 1}}}' if max_calls > 1 else ""
    schema = json.dumps({"anyOf": calls, "x-guidance": _JSON_STYLE})
    lark = f"start: call{more}\ncall: {_quoted(begin)} tool {_quoted(end)}\ntool: %json {schema}\n"
    import llguidance

    return llguidance.LLMatcher.grammar_from_lark(lark)


def _quoted(text: str) -> str:
    return json.dumps(text)


class GrammarCompiler:
    """Checks and starts grammars over one model's vocabulary."""

    def __init__(self, tokenizer_json: str, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """Args.

        tokenizer_json: a `tokenizer.json`.
        vocab_size: columns of the model's logits.
        eos_token_ids: the model's own; what may follow a complete output.
        """
        self._tokenizer_json = tokenizer_json
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)

    def check(self, grammar: str) -> None:
        """Raise GrammarError, with the library's best words, for a grammar that is none. Any thread may call it."""
        if len(grammar) > MAX_GRAMMAR_CHARACTERS:
            msg = f"the grammar has {len(grammar)} characters; at most {MAX_GRAMMAR_CHARACTERS} are allowed"
            raise GrammarError(msg)
        import llguidance

        if complaint := llguidance.LLMatcher.validate_grammar(grammar, self._tokenizer):
            raise GrammarError(complaint.splitlines()[0][:500])

    def start(self, grammar: str) -> "GrammarState":
        """The state before the first generated token. Raises GrammarError."""
        import llguidance

        matcher = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise GrammarError(matcher.get_error().splitlines()[0][:500])
        return GrammarState(matcher, self._vocab_size, self._eos_token_ids)

    @cached_property
    def _tokenizer(self) -> "llguidance.LLTokenizer":
        # A third of a second for 50,000 tokens, so only for those who use grammars.
        import llguidance

        return llguidance.LLTokenizer(self._tokenizer_json, n_vocab=self._vocab_size, eos_token=self._eos_token_ids[0])


class GrammarState:
    """What may follow the tokens read so far."""

    def __init__(self, matcher: "llguidance.LLMatcher", vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """Use `GrammarCompiler.start`."""
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self.num_read = 0

    def read(self, token_ids: Sequence[int]) -> None:
        """Go on by generated tokens. Raises GrammarError for one that may not follow."""
        for token_id in token_ids:
            if token_id in self._eos_token_ids or self._matcher.is_stopped():
                # The output was complete before it.
                self.num_read += 1
                continue
            if not self._matcher.consume_token(token_id):
                raise GrammarError(self._complaint())
            self.num_read += 1

    def allowed(self) -> npt.NDArray[np.bool_]:
        """[vocab_size] which tokens may follow; never none. Raises GrammarError when that takes too long."""
        allowed = np.zeros(self._vocab_size, dtype=np.bool_)
        if self._matcher.is_stopped():
            allowed[self._eos_token_ids] = True
            return allowed
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        if self._matcher.is_error():
            raise GrammarError(self._complaint())
        unpacked = np.unpackbits(bits, bitorder="little")[: self._vocab_size]
        allowed[: len(unpacked)] = unpacked.astype(np.bool_)
        if allowed[self._eos_token_ids[0]]:
            allowed[self._eos_token_ids] = True
        if not allowed.any():
            msg = "no token of this model can go on"
            raise GrammarError(msg)
        return allowed

    def _complaint(self) -> str:
        return f"the grammar cannot go on: {self._matcher.get_error().splitlines()[0][:200]}"
