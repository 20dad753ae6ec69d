"""Gumbel noise as a pure function of (seed, choice, position, token id): no state, no generator (E2).

Integers are mixed with the finaliser of SplitMix64 (public domain, Steele, Lea and Flood 2014), in int64
tensors: multiplication wraps alike on every device.
"""

import torch

from serving.engine.batch import SamplingKey

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_MULTIPLIER_1 = 0xBF58476D1CE4E5B9
_MULTIPLIER_2 = 0x94D049BB133111EB


def gumbel_noise(key: SamplingKey, token_ids: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise of some tokens.

    Args:
        key: only its seed, choice and position count.
        token_ids: [num_tokens] int64, on any device.

    Returns:
        [num_tokens] float64, finite; a token's noise does not depend on the other tokens.
    """
    mixed = _mix(token_ids * _signed(_GAMMA) + _signed(_row_state(key)))
    # 53 random bits, centred in their cells: never 0 and never 1, so both logarithms are finite.
    uniform = (_shift_right(mixed, 11).to(torch.float64) + 0.5) * 2.0**-53
    return uniform.log_().neg_().log_().neg_()


def _row_state(key: SamplingKey) -> int:
    """64 bits out of all bits of seed, choice and position."""
    state = 0
    for word in (key.seed & _MASK, key.seed >> 64, key.choice, key.position):
        state = _mix_int((state + _GAMMA) ^ (word & _MASK))
    return state


def _mix_int(value: int) -> int:
    value &= _MASK
    value = (value ^ (value >> 30)) * _MULTIPLIER_1 & _MASK
    value = (value ^ (value >> 27)) * _MULTIPLIER_2 & _MASK
    return value ^ (value >> 31)


def _mix(values: torch.Tensor) -> torch.Tensor:
    """`_mix_int` of each element."""
    values = (values ^ _shift_right(values, 30)) * _signed(_MULTIPLIER_1)
    values = (values ^ _shift_right(values, 27)) * _signed(_MULTIPLIER_2)
    return values ^ _shift_right(values, 31)


def _shift_right(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift; int64 itself shifts the sign in."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    """The int64 with the same bits."""
    return value - (1 << 64) if value >> 63 else value
