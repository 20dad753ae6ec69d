"""Requests from a trace, and random ones."""

import json
from pathlib import Path

import pytest

from serving.simulation.arrivals import TraceError, TraceScale, random_arrivals, read_trace


def _trace(tmp_path: Path, *lines: object) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return path


def _line(timestamp: int, input_length: int, output_length: int, *hash_ids: int) -> dict[str, object]:
    return {
        "timestamp": timestamp,
        "input_length": input_length,
        "output_length": output_length,
        "hash_ids": list(hash_ids),
    }


def test_lengths_are_divided_and_blocks_with_one_id_have_the_same_tokens(tmp_path: Path) -> None:
    path = _trace(tmp_path, _line(0, 1000, 33, 7, 8), _line(3000, 600, 1, 7, 9))
    first, second = read_trace(path, TraceScale(length=16), seed=0)
    assert (len(first.prompt_token_ids), first.output_length) == (63, 3)
    assert (len(second.prompt_token_ids), second.output_length) == (38, 1)
    assert first.prompt_token_ids[:32] == second.prompt_token_ids[:32] == tuple(range(7 * 32, 8 * 32))
    assert set(first.prompt_token_ids[32:]).isdisjoint(second.prompt_token_ids[32:])


def test_the_seed_places_arrivals_within_a_tick_and_speed_shortens_everything(tmp_path: Path) -> None:
    path = _trace(tmp_path, *(_line(3000 * (n // 5), 512, 16, n) for n in range(20)))
    scale = TraceScale(speed=2.0, tick_s=3.0)
    one, again, other = (read_trace(path, scale, seed) for seed in (1, 1, 2))
    assert one == again
    assert [arrival.at_s for arrival in one] != [arrival.at_s for arrival in other]
    assert all(0.0 <= arrival.at_s - 1.5 * (place // 5) < 1.5 for place, arrival in enumerate(one))


def test_only_the_first_requests_are_read_when_so_asked(tmp_path: Path) -> None:
    path = _trace(tmp_path, _line(0, 512, 16, 1), _line(3000, 512, 16, 2), "never read")
    assert len(read_trace(path, TraceScale(), seed=0, max_requests=2)) == 2


@pytest.mark.parametrize(
    "line",
    ["{", "[]", '{"timestamp": 0}', json.dumps(_line(0, 5000, 1, 1)), json.dumps({**_line(0, 1, 1), "hash_ids": 1})],
)
def test_a_line_that_is_no_request_is_named(tmp_path: Path, line: str) -> None:
    with pytest.raises(TraceError, match="line 2"):
        read_trace(_trace(tmp_path, _line(0, 512, 16, 1), line), TraceScale(), seed=0)


@pytest.mark.parametrize("length", [0, 3, 1024])
def test_a_scale_that_cuts_blocks_unevenly_is_refused(length: int) -> None:
    with pytest.raises(ValueError, match="length scale"):
        TraceScale(length=length)


def test_random_arrivals_follow_from_their_seed_and_share_some_prefixes() -> None:
    one, again = (random_arrivals(200, 5.0, seed=3) for _ in range(2))
    assert one == again != random_arrivals(200, 5.0, seed=4)
    starts = [arrival.prompt_token_ids[0] for arrival in one]
    assert 20 < len(starts) - len(set(starts)) < 80
    assert all(arrival.prompt_token_ids and arrival.output_length for arrival in one)
