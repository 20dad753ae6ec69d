"""Decides whether a drawn token is the last of its request. Used by the worker that draws it (C9)."""

from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from scheduler.request import Request
from scheduler.spec import AttemptId, FinishReason


class StopStringDetector(Protocol):
    """Matches stop strings over the text of a token stream; `serving.tokenizer` has the real one."""

    def push(self, token_id: int) -> bool:
        """Add a token; True once a stop string has appeared."""
        ...


StopStringDetectorFactory = Callable[[Sequence[str], int], StopStringDetector]
"""Of stop strings, and of the number of tokens that complete none of them."""


class StopChecker:
    """End-of-sequence and stop tokens, stop strings, and the length limit, in this order."""

    def __init__(self, eos_token_ids: Collection[int], make_detector: StopStringDetectorFactory) -> None:
        """Args.

        eos_token_ids: the model's own.
        make_detector: makes a detector for a request's stop strings.
        """
        self._eos_token_ids = frozenset(eos_token_ids)
        self._make_detector = make_detector
        self._detectors: dict[AttemptId, StopStringDetector] = {}

    def check(self, request: Request, token_id: int) -> FinishReason | None:
        """The reason if `token_id`, drawn next for `request`, ends it. Called once a drawn token."""
        stop = request.spec.stop
        if token_id in stop.stop_token_ids:
            return FinishReason.STOP
        if token_id in self._eos_token_ids and not stop.ignore_eos:
            return FinishReason.STOP
        if stop.stop_strings and self._detector(request).push(token_id):
            return FinishReason.STOP
        if request.num_generated + 1 >= stop.max_tokens:
            return FinishReason.LENGTH
        return None

    def forget(self, attempt_id: AttemptId) -> None:
        """The attempt has ended here."""
        self._detectors.pop(attempt_id, None)

    def _detector(self, request: Request) -> StopStringDetector:
        detector = self._detectors.get(request.attempt_id)
        if detector is None:
            detector = self._make_detector(request.spec.stop.stop_strings, request.spec.stop.min_tokens)
            # Tokens drawn elsewhere (an earlier attempt, the context worker) are part of the text.
            for token_id in request.token_ids[len(request.spec.prompt_token_ids) :]:
                detector.push(token_id)
            self._detectors[request.attempt_id] = detector
        return detector
