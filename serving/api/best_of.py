"""`best_of`: of the choices that were drawn for each prompt, the likeliest by logprob per token."""

from collections.abc import Sequence

from serving.api.answers import FinishedChoice


def likeliest(choices: Sequence[FinishedChoice], num_drawn: int, num_wanted: int) -> list[FinishedChoice]:
    """The best choices of every prompt, best first; all of them, as they were drawn, where all are wanted.

    Args:
        choices: `num_drawn` of each prompt, prompt by prompt.
        num_drawn: `best_of`.
        num_wanted: `n`, at most `num_drawn`. Where it is less, every choice has its logprobs.
    """
    if num_wanted == num_drawn:
        return list(choices)
    best: list[FinishedChoice] = []
    for first in range(0, len(choices), num_drawn):
        of_prompt = choices[first : first + num_drawn]
        # Stable: of two that are equally likely the earlier draw comes first.
        best += sorted(of_prompt, key=_logprob_per_token, reverse=True)[:num_wanted]
    return best


def _logprob_per_token(choice: FinishedChoice) -> float:
    logprobs = [token.logprobs.logprob for token in choice.scored]
    return sum(logprobs) / len(logprobs) if logprobs else 0.0
