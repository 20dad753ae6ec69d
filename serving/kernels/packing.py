"""The order of weights in memory that the native kernels read: panels of 16 outputs (`src/kernels.h`)."""

import torch

PANEL = 16
"""Outputs of one panel."""


def padded(width: int) -> int:
    """`width` rounded up to whole panels."""
    return -(-width // PANEL) * PANEL


def pack_matrix(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Panels of a layer's weight.

    Args:
        weight: [out_features, in_features], any float format.
        dtype: float32 or bfloat16: the format in which the panels are kept.

    Returns:
        [num_panels, in_features, 16] of `dtype`. In bfloat16 outputs n and n + 8 of a panel are neighbours, so that
        one 32-bit word holds both and widening either is one instruction.
    """
    num_outputs, num_inputs = weight.shape
    rows = torch.zeros(padded(num_outputs), num_inputs, dtype=dtype)
    rows[:num_outputs] = weight
    if dtype is torch.bfloat16:
        return rows.view(-1, 2, PANEL // 2, num_inputs).permute(0, 3, 2, 1).reshape(-1, num_inputs, PANEL)
    return rows.view(-1, PANEL, num_inputs).transpose(1, 2).contiguous()


def pack_gate_up(gate: torch.Tensor, up: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Panels of gate and up in turn, so that one tile holds what is multiplied: [2 * num_panels, in_features, 16]."""
    pairs = torch.stack([pack_matrix(gate, dtype), pack_matrix(up, dtype)], dim=1)
    return pairs.flatten(0, 1)


def pack_norm(weight: torch.Tensor) -> torch.Tensor:
    """A norm's weight in float32, padded with 0 to whole panels."""
    out = torch.zeros(padded(len(weight)))
    out[: len(weight)] = weight
    return out
