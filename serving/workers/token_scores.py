"""`TokenScores`: the logprobs that a worker reports with its tokens, collected over the chunks of a prompt."""

from dataclasses import dataclass

from scheduler.output import SchedulerOutput
from scheduler.request import Request
from scheduler.spec import AttemptId, TokenLogprobs
from serving.engine.batch import StepResult


@dataclass(frozen=True, slots=True)
class TokenScore:
    """What one token event says of likelihoods. See `TokenEvent`."""

    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None


class TokenScores:
    """Per attempt, what the chunks of its prompt scored; given away with its first token."""

    def __init__(self) -> None:
        """Nothing was scored yet."""
        self._prompts: dict[AttemptId, dict[int, TokenLogprobs]] = {}

    def take(self, output: SchedulerOutput, result: StepResult) -> None:
        """Keep what this step scored of prompts. A position that is computed again scores the same (E1)."""
        for chunk in output.contexts:
            scored = result.prompt_logprobs.get(chunk.request.request_id, ())
            if scored:
                found = self._prompts.setdefault(chunk.request.attempt_id, {})
                found.update(enumerate(scored, start=chunk.start + 1))

    def of_token(self, request: Request, position: int, result: StepResult) -> TokenScore:
        """What to say with the token that `result` drew at `position`."""
        logprobs = result.logprobs.get(request.request_id)
        if position or not request.wants_prompt_logprobs:
            return TokenScore(logprobs)
        found = self._prompts.pop(request.attempt_id, {})
        # KeyError: a position that no chunk computed. Nothing may be reported in its place (I7).
        positions = range(1, len(request.spec.prompt_token_ids))
        return TokenScore(logprobs, tuple(found[of_prompt] for of_prompt in positions))

    def forget(self, attempt_id: AttemptId) -> None:
        """The attempt has ended here."""
        self._prompts.pop(attempt_id, None)
