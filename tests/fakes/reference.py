"""Greedy decoding by transformers on the same weights: the outside reference (I15)."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import transformers

_CLOSE = 1e-3  # I15: where the two best logits are nearer than this, either token is right


@dataclass(frozen=True, slots=True)
class ReferenceStep:
    """A greedy token, and by how much its logit led."""

    token_id: int
    lead: float


@lru_cache(maxsize=1)
def _model(folder: Path) -> Any:  # transformers has no static types here
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def transformers_greedy(folder: Path, prompt: Sequence[int], num_tokens: int) -> list[ReferenceStep]:
    """`num_tokens` greedy tokens after `prompt`, in float32, end-of-sequence tokens not ending it."""
    torch.set_num_threads(1)  # two threads collapse when the other core is busy
    with torch.inference_mode():
        answer = _model(folder).generate(
            torch.tensor([list(prompt)]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            max_new_tokens=num_tokens,
            min_new_tokens=None,
            eos_token_id=None,
            output_logits=True,
            return_dict_in_generate=True,
        )
    steps = []
    for logits in answer.logits:
        best = logits[0].topk(2)
        steps.append(ReferenceStep(int(best.indices[0]), float(best.values[0] - best.values[1])))
    return steps


def agrees_with_reference(tokens: Sequence[int], steps: Sequence[ReferenceStep]) -> None:
    """Assert equality token for token, up to the first place where the reference itself is undecided."""
    assert len(tokens) == len(steps)
    for position, (token_id, step) in enumerate(zip(tokens, steps, strict=True)):
        if token_id != step.token_id:
            assert step.lead <= _CLOSE, f"token {position}: {token_id} instead of {step.token_id}, lead {step.lead}"
            return
