"""What a chaos run makes of one stream's waits."""

import pytest

from serving.chaos.jobs import Job, Stream, covered_s

_JOB = Job((5, 6), 4, 0.0, 1)


def test_time_in_several_spans_counts_once_and_only_within_the_gap() -> None:
    spans = [(0.0, 2.0), (1.0, 3.0), (5.0, 9.0), (6.0, 7.0)]
    assert covered_s(spans, 1.5, 6.0) == pytest.approx(1.5 + 1.0)
    assert covered_s([], 0.0, 1.0) == 0.0


def test_a_gap_is_excused_by_the_phases_in_it_and_by_no_others() -> None:
    stream = Stream(_JOB, sent_at_s=100.0, arrivals_s=[101.0, 101.1, 104.1, 104.2])
    assert stream.own_gap_s == pytest.approx(3.0)
    stream.timeline = {
        "spans": [
            {"name": "context", "began_s": 0.2, "lasted_s": 0.8},
            {"name": "generation", "began_s": 1.0, "lasted_s": 3.0},
            {"name": "central", "began_s": 1.6, "lasted_s": 0.5},
            {"name": "context", "began_s": 2.1, "lasted_s": 1.5},
        ]
    }
    assert stream.own_gap_s == pytest.approx(1.0)
