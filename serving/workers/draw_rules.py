"""`DrawRules`: what applies to a request's next draw, from its parameters and the tokens it has generated.

Everything here is a function of the prompt and of the generated tokens, those of earlier attempts included: a
resumed request finds the same rules wherever it runs (C9). What is kept between steps only saves counting
again.
"""

from collections import Counter
from collections.abc import Collection, Iterable

import numpy as np
import numpy.typing as npt

from scheduler.request import Request
from scheduler.spec import AttemptId
from serving.engine.logit_rules import LogitRules, TokenIds
from serving.grammar import GrammarCompiler, GrammarError, GrammarState


class _TokenCounts:
    """How often each token was generated."""

    def __init__(self, request: Request) -> None:
        """Nothing is counted yet."""
        self._num_counted = 0
        self._counts: Counter[int] = Counter()
        self._prompt_ids = frozenset(request.spec.prompt_token_ids)

    def update(self, request: Request) -> None:
        """Count what was generated since the last call."""
        num_prompt = len(request.spec.prompt_token_ids)
        if request.num_generated < self._num_counted:
            # Tokens of a step that could not be completed were taken back.
            self._num_counted = 0
            self._counts.clear()
        self._counts.update(request.token_ids[num_prompt + self._num_counted :])
        self._num_counted = request.num_generated

    def generated(self) -> tuple[TokenIds, TokenIds]:
        """Distinct generated tokens, and how often each was."""
        return _ids(self._counts), _ids(self._counts.values())

    def seen(self) -> TokenIds:
        """Distinct tokens of prompt and output."""
        return _ids(self._prompt_ids | self._counts.keys())


class DrawRules:
    """Rules of every attempt on one worker."""

    def __init__(self, eos_token_ids: Collection[int], grammars: GrammarCompiler | None) -> None:
        """Args.

        eos_token_ids: the model's own.
        grammars: starts them; None where the model has no text.
        """
        self._eos_token_ids = tuple(eos_token_ids)
        self._grammars = grammars
        self._states: dict[AttemptId, GrammarState] = {}
        self._faults: dict[AttemptId, str] = {}
        self._counts: dict[AttemptId, _TokenCounts] = {}

    def next_draw(self, request: Request) -> LogitRules | None:
        """The rules of the token that is drawn next; None when its logits are drawn from as they are."""
        sampling = request.spec.sampling
        forbidden = self._forbidden(request)
        if sampling.has_plain_logits and not forbidden:
            return None
        penalties = sampling.penalties
        generated_ids, generated_counts, seen_ids = _ids(()), _ids(()), _ids(())
        if not penalties.is_neutral:
            counts = self._counts_of(request)
            generated_ids, generated_counts = counts.generated()
            seen_ids = counts.seen() if penalties.repetition != 1.0 else seen_ids
        return LogitRules(
            repetition=penalties.repetition,
            seen_ids=seen_ids,
            presence=penalties.presence,
            frequency=penalties.frequency,
            generated_ids=generated_ids,
            generated_counts=generated_counts,
            bias_ids=_ids(token_id for token_id, _ in sampling.logit_bias),
            allowed=self._allowed(request) if sampling.grammar else None,
            bias=np.array([bias for _, bias in sampling.logit_bias]) if sampling.logit_bias else None,
            forbidden_ids=_ids(forbidden),
        )

    def forget(self, attempt_id: AttemptId) -> None:
        """The attempt has ended here."""
        self._counts.pop(attempt_id, None)
        self._states.pop(attempt_id, None)
        self._faults.pop(attempt_id, None)

    def fault(self, attempt_id: AttemptId) -> str | None:
        """Why the attempt's grammar cannot go on: what was drawn last was drawn without it, and is no answer."""
        return self._faults.get(attempt_id)

    def _allowed(self, request: Request) -> npt.NDArray[np.bool_] | None:
        """What the grammar lets follow; None when it cannot say, which ends this request and no other."""
        generated = request.token_ids[len(request.spec.prompt_token_ids) :]
        try:
            state = self._states.get(request.attempt_id)
            if state is None or state.num_read > len(generated):
                if self._grammars is None:
                    msg = "this model has no tokenizer, so its tokens follow no grammar"
                    raise GrammarError(msg)
                state = self._states[request.attempt_id] = self._grammars.start(request.spec.sampling.grammar)
            state.read(generated[state.num_read :])
            return state.allowed()
        except GrammarError as error:
            self._faults[request.attempt_id] = f"request {request.spec.uid}: {error}"
            return None

    def _forbidden(self, request: Request) -> tuple[int, ...]:
        """Tokens that would end the request before it may end."""
        stop = request.spec.stop
        if request.num_generated >= stop.min_tokens:
            return ()
        return (*stop.stop_token_ids, *(() if stop.ignore_eos else self._eos_token_ids))

    def _counts_of(self, request: Request) -> _TokenCounts:
        counts = self._counts.get(request.attempt_id)
        if counts is None:
            counts = self._counts[request.attempt_id] = _TokenCounts(request)
        counts.update(request)
        return counts


def _ids(values: Iterable[int]) -> TokenIds:
    return np.fromiter(values, dtype=np.int64)
