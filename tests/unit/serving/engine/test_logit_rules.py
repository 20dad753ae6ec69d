"""Changes of a row before its draw: each does what it says, and nothing else."""

import numpy as np
import pytest
import torch

from serving.engine.batch import SamplingKey
from serving.engine.logit_rules import LogitRules
from serving.engine.sampler import NonFiniteLogitsError, draw_tokens

_ROW = torch.tensor([1.0, -2.0, 3.0, 0.5, 2.5])
_GREEDY = SamplingKey(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, choice=0, position=0)


def _ids(*values: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(values, dtype=np.int64)


def test_presence_counts_once_and_frequency_each_time() -> None:
    rules = LogitRules(presence=0.5, frequency=0.25, generated_ids=_ids(0, 2), generated_counts=_ids(1, 3))
    assert rules.apply(_ROW).tolist() == [0.25, -2.0, 1.75, 0.5, 2.5]


def test_repetition_makes_positive_and_negative_logits_less_likely() -> None:
    rules = LogitRules(repetition=2.0, seen_ids=_ids(1, 2))
    assert rules.apply(_ROW).tolist() == [1.0, -4.0, 1.5, 0.5, 2.5]


def test_a_bias_is_added_after_the_penalties() -> None:
    rules = LogitRules(repetition=2.0, seen_ids=_ids(2), bias_ids=_ids(2, 4), bias=np.array([4.0, -1.0]))
    assert rules.apply(_ROW).tolist() == [1.0, -2.0, 5.5, 0.5, 1.5]


def test_the_row_itself_stays_as_it_was() -> None:
    row = _ROW.double()
    LogitRules(bias_ids=_ids(0), bias=np.array([9.0]), forbidden_ids=_ids(1)).apply(row)
    assert torch.equal(row, _ROW.double())


def test_forbidden_tokens_are_never_drawn_unless_the_grammar_allows_nothing_else() -> None:
    assert draw_tokens(_ROW[None], [_GREEDY], [LogitRules(forbidden_ids=_ids(2))]) == [4]
    only_two = np.array([False, False, True, False, False])
    assert draw_tokens(_ROW[None], [_GREEDY], [LogitRules(allowed=only_two, forbidden_ids=_ids(2))]) == [2]


@pytest.mark.parametrize("temperature", [0.0, 1.0, 2.0])
@pytest.mark.parametrize(("top_k", "top_p", "min_p"), [(0, 1.0, 0.0), (3, 1.0, 0.0), (0, 0.9, 0.0), (0, 1.0, 0.1)])
def test_only_allowed_tokens_are_drawn_whatever_else_filters(
    temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    rules = LogitRules(allowed=np.array([False, True, False, True, False]))
    keys = [SamplingKey(temperature, top_k, top_p, min_p, seed=3, choice=0, position=p) for p in range(200)]
    drawn = set(draw_tokens(_ROW.expand(200, -1), keys, [rules] * 200))
    assert 3 in drawn <= {1, 3}


def test_a_grammar_that_allows_nothing_draws_nothing() -> None:
    with pytest.raises(NonFiniteLogitsError):
        draw_tokens(_ROW[None], [_GREEDY], [LogitRules(allowed=np.zeros(5, dtype=np.bool_))])


def test_rows_without_rules_are_drawn_as_before() -> None:
    rows = torch.stack([_ROW, _ROW])
    assert draw_tokens(rows, [_GREEDY] * 2, [LogitRules(forbidden_ids=_ids(2)), None]) == [4, 2]
