"""The Llama forward pass over paged keys and values: embedding, layers, final norm, output head.

The residual stream and everything between two matrix products is float32; rows are rounded to the
model's format where a linear layer reads them and where pages are written.

Every operation here gives a row the same bits in any batch (E1). Measured on CPU (torch 2.13, 1 to 4
threads, 480 offsets and lengths): exp, log, rsqrt, division and rounding are equal in vector and scalar
code, as are sums, maxima and rms_norm over the last dimension; silu and sigmoid are not, in the
tail of a tensor. Hence `_silu`.
"""

import torch
from torch.nn import functional

from configs import ModelConfig
from manager import LayerGroupId
from serving.engine.attention import attend, write_pages
from serving.engine.linear import apply_linear
from serving.engine.plan import BatchRules, GroupPlan, StepPlan
from serving.engine.weights import LayerWeights, ModelWeights


class LlamaModel:
    """Weights and rotary tables; stateless between steps."""

    def __init__(self, config: ModelConfig, weights: ModelWeights, rules: BatchRules) -> None:
        """Compute the rotary tables up to `config.max_position`."""
        self._config = config
        self._weights = weights
        self._rules = rules
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        frequencies = 1.0 / (config.rope_theta**exponents)
        angles = torch.outer(torch.arange(config.max_position, dtype=torch.float32), frequencies)
        self._cos = angles.cos().to(weights.device)
        self._sin = angles.sin().to(weights.device)
        self._scale = config.head_dim**-0.5

    def forward(
        self,
        plan: StepPlan,
        pools: dict[LayerGroupId, torch.Tensor],
        layer_places: list[tuple[LayerGroupId, int]],
    ) -> torch.Tensor:
        """Run all layers; writes this step's keys and values into the pools.

        Args:
            plan: of the step.
            pools: by layer group; changed.
            layer_places: for each layer, its group and its index there.

        Returns:
            [num_rows, hidden_size] float32 before the final norm; rows past `plan.num_tokens` are padding.
        """
        weights = self._weights
        hidden = functional.embedding(plan.token_ids, weights.embedding).float()
        cos, sin = self._cos[plan.positions].unsqueeze(1), self._sin[plan.positions].unsqueeze(1)
        rule = self._rules.linear
        for layer, (group, index) in zip(weights.layers, layer_places, strict=True):
            rows = self._norm(hidden, layer.attention_norm)
            qkv = apply_linear(layer.qkv, rows, rule).float()
            attended = self._attention(qkv, (cos, sin), pools[group], index, plan.groups[group])
            hidden = hidden + apply_linear(layer.attention_out, attended, rule)
            hidden = hidden + self._mlp(self._norm(hidden, layer.mlp_norm), layer)
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map [num_rows, hidden_size] from `forward` to [num_rows, vocab_size] float32."""
        rows = self._norm(hidden, self._weights.final_norm)
        return apply_linear(self._weights.head, rows, self._rules.head).float()

    def _norm(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """RMS norm in float32, rounded to the model's format for the linear layer that reads it."""
        epsilon = self._config.rms_norm_eps
        return functional.rms_norm(hidden, weight.shape, weight, epsilon).to(self._weights.dtype)

    def _attention(
        self,
        qkv: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        pool: torch.Tensor,
        layer: int,
        plan: GroupPlan,
    ) -> torch.Tensor:
        config = self._config
        num_q, num_kv, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        heads = qkv.view(len(qkv), num_q + 2 * num_kv, head_dim)
        queries_keys = _rotate(heads[:, : num_q + num_kv], *rotation)
        num_tokens = len(plan.token_rows)
        keys_values = torch.cat([queries_keys[:num_tokens, num_q:], heads[:num_tokens, num_q + num_kv :]], 1)
        write_pages(pool, plan.token_rows, layer, keys_values)
        queries = (queries_keys[:, :num_q] * self._scale).view(len(qkv), num_kv, num_q // num_kv, head_dim)
        out = qkv.new_zeros(len(qkv), num_q * head_dim)
        for group in plan.attention:
            out[group.query_rows] = attend(queries, pool, layer, group)
        return out.to(self._weights.dtype)

    def _mlp(self, rows: torch.Tensor, layer: LayerWeights) -> torch.Tensor:
        rule = self._rules.linear
        gate_up = apply_linear(layer.gate_up, rows, rule).float()
        gate, up = gate_up.chunk(2, dim=-1)
        return apply_linear(layer.down, (_silu(gate) * up).to(self._weights.dtype), rule).float()


def _rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding, halves layout: [rows, heads, head_dim] by [rows, 1, head_dim / 2] tables."""
    first, second = heads.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def _silu(values: torch.Tensor) -> torch.Tensor:
    """The SiLU, x * sigmoid(x), out of operations that are equal in vector and scalar code."""
    return values / (values.neg().exp_().add_(1.0))
