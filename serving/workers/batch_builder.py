"""Turns a committed plan into the rows of one step. The only place where requests become arrays."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from manager import KVCacheManager, LayerGroupId
from scheduler.output import ContextChunk, SchedulerOutput
from scheduler.request import Request
from scheduler.spec import AttemptId
from serving.engine.batch import Draw, SamplingKey, SequenceRows, StepBatch
from serving.workers.draw_rules import DrawRules


class BatchBuilder:
    """Reads tokens from the requests and places from the manager."""

    def __init__(self, manager: KVCacheManager, layer_groups: Sequence[LayerGroupId], rules: DrawRules) -> None:
        """`layer_groups`: those of the model, each with its own block table."""
        self._manager = manager
        self._rules = rules
        self._layer_groups = tuple(layer_groups)

    def build(self, output: SchedulerOutput, drawers: Callable[[ContextChunk], Sequence[Request]]) -> StepBatch:
        """Contexts first, then decodes, in the plan's order.

        `drawers`: who draws from a chunk's logits, its own request first.
        """
        rows = []
        for chunk in output.contexts:
            sequence = self._rows(chunk.request, chunk.start, chunk.num_tokens, draws=chunk.is_last)
            further = drawers(chunk)[1:]
            if further:
                sequence = replace(sequence, further_draws=tuple(map(self._draw, further)))
            rows.append(sequence)
        for request in output.generations:
            start = self._manager.history_length(request.request_id)
            rows.append(self._rows(request, start, len(request.token_ids) - start, draws=True))
        return StepBatch(rows)

    def _draw(self, request: Request) -> Draw:
        rules, num_logprobs = self._rules.next_draw(request), request.spec.sampling.num_logprobs
        return Draw(request.request_id, _sampling_key(request), rules, num_logprobs)

    def forget(self, attempt_id: AttemptId) -> None:
        """The attempt has ended here."""
        self._rules.forget(attempt_id)

    def fault(self, attempt_id: AttemptId) -> str | None:
        """Why what this attempt drew last must not be used; None when it may."""
        return self._rules.fault(attempt_id)

    def _rows(self, request: Request, start: int, num_tokens: int, *, draws: bool) -> SequenceRows:
        end = start + num_tokens
        return SequenceRows(
            request_id=request.request_id,
            token_ids=np.asarray(request.token_ids[start:end], dtype=np.int64),
            start=start,
            block_tables={group: self._manager.block_table(request.request_id, group) for group in self._layer_groups},
            sampling=_sampling_key(request) if draws else None,
            rules=self._rules.next_draw(request) if draws else None,
            num_logprobs=request.spec.sampling.num_logprobs,
            scored_token_ids=_scored_tokens(request, start, end),
        )


def _scored_tokens(request: Request, start: int, end: int) -> npt.NDArray[np.int64] | None:
    """What follows each of positions [start, end) in the prompt; None where nobody asked, or has been told."""
    if not request.wants_prompt_logprobs or request.num_generated:
        return None
    return np.asarray(request.token_ids[start + 1 : end + 1], dtype=np.int64)


def _sampling_key(request: Request) -> SamplingKey:
    sampling = request.spec.sampling
    return SamplingKey(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        seed=sampling.seed,
        choice=sampling.choice,
        position=request.num_generated,
    )
