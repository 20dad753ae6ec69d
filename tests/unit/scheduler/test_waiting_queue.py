import pytest
from hypothesis import given
from hypothesis import strategies as st

from manager import RequestId
from scheduler.policy import Ordering
from scheduler.request import Request
from scheduler.waiting_queue import WaitingQueue
from tests.fakes.attempts import make_request


def queue_of(*priorities: int, arrivals_per_priority: int = 2) -> WaitingQueue:
    queue = WaitingQueue(Ordering(arrivals_per_priority).rank)
    for arrival, priority in enumerate(priorities):
        queue.push(make_request(f"r{arrival}", arrival=arrival, priority=priority))
    return queue


def drain(queue: WaitingQueue) -> list[str]:
    return [queue.pop().attempt_id for _ in range(len(queue))]


def test_equal_priorities_leave_in_order_of_arrival() -> None:
    assert drain(queue_of(0, 0, 0)) == ["r0", "r1", "r2"]


def test_a_priority_level_overtakes_only_so_many_earlier_arrivals() -> None:
    assert drain(queue_of(0, 0, 0, 0, 1)) == ["r0", "r1", "r2", "r4", "r3"]


def test_a_removed_request_is_skipped_wherever_it_stood() -> None:
    queue = queue_of(0, 0, 0, 0)
    for name in ("r0", "r2", "never-there"):
        queue.discard(RequestId(name))
    assert len(queue) == 2
    assert [request.attempt_id for request in queue.in_order()] == ["r1", "r3"]
    assert drain(queue) == ["r1", "r3"]


def test_pushing_back_what_was_popped_restores_the_line() -> None:
    queue = queue_of(0, 1, 0)
    before = queue.in_order()
    popped = [queue.pop(), queue.pop()]
    for request in popped:
        queue.push(request)
    assert queue.in_order() == before


def test_looking_at_the_head_takes_nothing() -> None:
    queue = queue_of(0)
    assert queue.peek() is queue.peek()
    assert len(queue) == 1


def test_an_empty_line_has_no_head_and_nothing_to_pop() -> None:
    queue = queue_of()
    assert queue.peek() is None
    with pytest.raises(IndexError):
        queue.pop()


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("push"), st.integers(-1, 2)),
            st.tuples(st.sampled_from(["pop", "pop and push back", "discard", "look"]), st.integers(0, 50)),
        ),
        max_size=60,
    )
)
def test_the_line_equals_a_sorted_list_whatever_happens(steps: list[tuple[str, int]]) -> None:
    ordering = Ordering(arrivals_per_priority=2)
    queue, arrivals = WaitingQueue(ordering.rank), 0
    model: list[Request] = []
    for action, number in steps:
        if action == "push":
            request = make_request(f"r{arrivals}", 1, arrival=arrivals, priority=number)
            arrivals += 1
            queue.push(request)
            model = ordering.first_to_last([*model, request])
        elif action == "look":
            assert queue.in_order() == model
        elif model and action == "discard":
            queue.discard(model.pop(number % len(model)).request_id)
        elif model:
            popped = queue.pop()
            assert popped is model[0]
            if action == "pop":
                del model[0]
            else:
                queue.push(popped)
        assert queue.peek() is (model[0] if model else None)
        assert len(queue) == len(model)
    assert queue.in_order() == model
