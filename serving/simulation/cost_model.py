"""`CostModel`: how long a step takes, as a sum of what was measured. Virtual seconds only; measures nothing."""

from dataclasses import dataclass

from serving.engine.batch import SequenceRows, StepBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """seconds = fixed + context tokens + their attention + decode rows + history bytes / bandwidth.

    Attributes:
        pass_s: planning and completing, step or no step.
        step_s: reading the weights; paid once a step.
        context_token_s: the linear layers of one context token.
        context_attention_s: one context token's attention to one position before it.
        decode_row_s: the linear layers of one decode row, beyond `step_s`.
        kv_bytes_per_token: K and V of one position, read by every decode row.
        memory_bytes_per_s: speed of that reading.
    """

    pass_s: float = 100e-6
    step_s: float = 35e-3
    context_token_s: float = 1.25e-3
    context_attention_s: float = 0.5e-6
    decode_row_s: float = 1.2e-3
    kv_bytes_per_token: int = 23_040
    memory_bytes_per_s: float = 28e9

    def seconds(self, batch: StepBatch) -> float:
        """Duration of one step."""
        return self.step_s + sum(self._row_seconds(rows) for rows in batch.sequences)

    def _row_seconds(self, rows: SequenceRows) -> float:
        num_tokens, start = len(rows.token_ids), rows.start
        if num_tokens == 1:
            return self.decode_row_s + start * self.kv_bytes_per_token / self.memory_bytes_per_s
        positions = num_tokens * start + num_tokens * (num_tokens + 1) // 2
        return num_tokens * self.context_token_s + positions * self.context_attention_s


SMOLLM2_CPU = CostModel()
"""SmolLM2-135M in bfloat16 on one Zen 4 core: 35 ms to read the weights, 1.2 ms a row, 800 context tokens/s."""

DECODE_BOUND = CostModel(step_s=30e-3, context_token_s=40e-6, context_attention_s=2e-9, decode_row_s=0.2e-3)
"""A device with much arithmetic for its bandwidth: contexts end fast, decodes pile up and pages run short."""
