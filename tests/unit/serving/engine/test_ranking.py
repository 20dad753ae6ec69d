"""Logprobs of a row: right, ordered, and alike on any number of threads."""

from collections.abc import Callable

import pytest
import torch

from serving.engine.ranking import log_sum_exp, token_logprobs


def test_a_tokens_logprob_is_that_of_the_softmax() -> None:
    logits = torch.randn(1000, generator=torch.Generator().manual_seed(1)) * 5
    expected = logits.double().log_softmax(-1)
    found = token_logprobs(logits, 77, 3)
    assert found.logprob == pytest.approx(expected[77].item(), abs=1e-12)
    assert [token_id for token_id, _ in found.top] == expected.topk(3).indices.tolist()


def test_equal_tokens_are_named_lower_id_first() -> None:
    logits = torch.zeros(50)
    logits[[9, 4, 30]] = 2.0
    assert [token_id for token_id, _ in token_logprobs(logits, 0, 4).top] == [4, 9, 30, 0]


def test_the_sum_over_a_vocabulary_does_not_depend_on_the_threads(set_threads: Callable[[int], None]) -> None:
    scores = (torch.randn(49_152, generator=torch.Generator().manual_seed(2)) * 4).double()
    sums = set()
    for threads in (1, 2, 3):
        set_threads(threads)
        sums.add(log_sum_exp(scores))
    assert len(sums) == 1


def test_a_token_without_any_probability_is_minus_infinity() -> None:
    logits = torch.zeros(10)
    logits[3] = float("-inf")
    assert token_logprobs(logits, 3, 0).logprob == float("-inf")
