"""Reports are handled in the order in which they were made, whatever order they arrive in."""

import itertools

import pytest

from manager import Epoch, WorkerName
from scheduler.messages import ReportBatch
from serving.actors.report_order import ReportOrder


def _batch(sequence: int, epoch: int = 1, worker: str = "w") -> ReportBatch:
    return ReportBatch(WorkerName(worker), Epoch(epoch), (), sequence)


@pytest.mark.parametrize("arrival", list(itertools.permutations([1, 2, 3, 4])))
def test_any_order_of_arrival_comes_out_in_order_and_once(arrival: tuple[int, ...]) -> None:
    order = ReportOrder()
    out = [ready.sequence for sequence in arrival for ready in order.push(_batch(sequence))]
    assert out == [1, 2, 3, 4]


def test_workers_do_not_wait_for_one_another() -> None:
    order = ReportOrder()
    assert order.push(_batch(2, worker="a")) == []
    assert [ready.sequence for ready in order.push(_batch(1, worker="b"))] == [1]


def test_a_new_life_starts_at_one_and_what_the_old_one_held_back_is_gone() -> None:
    order = ReportOrder()
    assert order.push(_batch(2, epoch=1)) == []
    assert [ready.epoch for ready in order.push(_batch(1, epoch=2))] == [2]
    assert [ready.epoch for ready in order.push(_batch(2, epoch=2))] == [2]


def test_a_late_batch_of_an_old_life_passes_through_to_be_refused() -> None:
    order = ReportOrder()
    order.push(_batch(1, epoch=2))
    assert order.push(_batch(7, epoch=1)) == [_batch(7, epoch=1)]
