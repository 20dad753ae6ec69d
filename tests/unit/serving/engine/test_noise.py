import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from serving.engine.batch import SamplingKey
from serving.engine.noise import gumbel_noise

_KEY = SamplingKey(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=5, choice=0, position=0)
_MASK = (1 << 64) - 1


def _mix(value: int) -> int:
    """SplitMix64's finaliser in Python's integers."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


@pytest.mark.parametrize("key", [_KEY, SamplingKey(1.0, 0, 1.0, 0.0, seed=2**64 - 3, choice=15, position=8191)])
def test_the_noise_is_the_published_hash_of_seed_choice_position_and_token(key: SamplingKey) -> None:
    gamma = 0x9E3779B97F4A7C15
    state = 0
    for word in (key.seed, 0, key.choice, key.position):
        state = _mix(((state + gamma) & _MASK) ^ word)
    tokens = [0, 1, 299, 49151]
    uniform = [((_mix((token * gamma + state) & _MASK) >> 11) + 0.5) * 2.0**-53 for token in tokens]

    noise = gumbel_noise(key, torch.tensor(tokens))

    assert noise.tolist() == pytest.approx([-math.log(-math.log(u)) for u in uniform], rel=1e-12)


def test_a_tokens_noise_does_not_depend_on_the_tokens_around_it() -> None:
    everything = gumbel_noise(_KEY, torch.arange(50_000))
    some = torch.randperm(50_000, generator=torch.Generator().manual_seed(0))[:777]

    assert torch.equal(gumbel_noise(_KEY, some), everything[some])
    assert torch.equal(gumbel_noise(_KEY, torch.tensor([31])), everything[31:32])


def test_the_noise_is_the_same_with_two_threads(set_threads: Callable[[int], None]) -> None:
    set_threads(1)
    one = gumbel_noise(_KEY, torch.arange(131_071))
    set_threads(2)

    assert torch.equal(gumbel_noise(_KEY, torch.arange(131_071)), one)


@pytest.mark.parametrize("bit", [0, 1, 31, 32, 53, 62, 63])
def test_every_bit_of_the_seed_counts(bit: int) -> None:
    tokens = torch.arange(64)

    other = gumbel_noise(replace(_KEY, seed=_KEY.seed ^ (1 << bit)), tokens)

    assert not bool((other == gumbel_noise(_KEY, tokens)).any())


def test_the_noise_has_the_mean_and_spread_of_gumbel() -> None:
    noise = gumbel_noise(_KEY, torch.arange(400_000))

    assert bool(noise.isfinite().all())
    assert float(noise.mean()) == pytest.approx(0.5772, abs=0.01)
    assert float(noise.var()) == pytest.approx(math.pi**2 / 6, abs=0.02)


def test_the_noise_of_neighbouring_positions_and_tokens_is_uncorrelated() -> None:
    tokens = torch.arange(100_000)
    here, next_position = gumbel_noise(_KEY, tokens), gumbel_noise(replace(_KEY, position=1), tokens)

    assert abs(float(torch.corrcoef(torch.stack([here, next_position]))[0, 1])) < 0.01
    assert abs(float(torch.corrcoef(torch.stack([here[:-1], here[1:]]))[0, 1])) < 0.01
