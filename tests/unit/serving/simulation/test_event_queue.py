"""Virtual time."""

import pytest

from serving.simulation.event_queue import EventQueue


def test_events_run_in_order_of_time_and_then_of_posting() -> None:
    events, seen = EventQueue(), []
    events.at(2.0, lambda: seen.append("late"))
    events.at(1.0, lambda: seen.append("first"))
    events.at(1.0, lambda: seen.append("second"))
    events.run_until(3.0)
    assert seen == ["first", "second", "late"]
    assert events.now_s == 3.0


def test_an_event_may_post_another_for_the_same_moment() -> None:
    events, seen = EventQueue(), []
    events.at(1.0, lambda: events.after(0.0, lambda: seen.append(events.now_s)))
    events.run_until(1.0)
    assert seen == [1.0]


def test_the_past_is_refused() -> None:
    events = EventQueue()
    events.run_until(5.0)
    with pytest.raises(ValueError, match="posted at"):
        events.at(4.0, lambda: None)


def test_running_while_something_holds_stops_at_the_event_that_ends_it() -> None:
    events, seen = EventQueue(), []
    for at_s in (1.0, 2.0, 3.0):
        events.at(at_s, lambda at_s=at_s: seen.append(at_s))  # type: ignore[misc]
    assert events.run_while(lambda: len(seen) < 2, limit_s=10.0)
    assert seen == [1.0, 2.0]
    assert not events.run_while(lambda: True, limit_s=2.5)
    assert seen == [1.0, 2.0]
