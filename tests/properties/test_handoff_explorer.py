"""The handoff under everything that can happen to it: no page lost or shared, one end each, baseline afterwards."""

import time
from collections import Counter

import pytest

from manager import KVCacheManagerV2
from tests.properties.handoff_explorer import counts_of, events_of, explore, fails, shape_of

_NUM_SEEDS = 300
_PARTS = 6
_SLOW_SEEDS = 10_000
_SLOW_S = 1200.0
_totals: Counter[str] = Counter()


@pytest.mark.parametrize("part", range(_PARTS))
def test_whatever_happens_no_page_is_lost_and_everything_ends_once(part: int) -> None:
    for seed in range(part, _NUM_SEEDS, _PARTS):
        _totals.update(counts_of(explore(seed)))


@pytest.mark.parametrize("seed", [106, 281, 495, 499, 1911, 1955, 5056])
def test_seeds_that_found_a_fault_find_none_any_more(seed: int) -> None:
    explore(seed)


def test_the_seeds_reach_everything_that_can_happen() -> None:
    totals = _totals if _totals["streams"] else Counter()
    if not totals:  # run by itself
        for seed in range(60):
            totals.update(counts_of(explore(seed)))
    wanted = (
        "receives_verified", "receives_failed", "receives_expired", "receives_cancelled", "leases_expired",
        "leases_dropped", "reservations_expired", "reservations_renewed", "late_signals", "deferrals", "suspensions",
        "resumes", "recomputes", "abandoned_steps", "lost_pages", "killed", "resubmissions", "retries", "divergences",
        "stream finished", "stream aborted",
    )  # fmt: skip
    assert [name for name in wanted if not totals[name]] == []
    assert totals["stream finished"] > 10 * totals["stream failed"]


def test_a_fault_of_the_product_is_found_and_told_by_its_seed_and_a_few_events(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Pages that a read may still write into go straight back to the free list.
    def hand_on(manager: KVCacheManagerV2, request: object) -> None:
        manager.free_resources(request)  # type: ignore[arg-type]

    monkeypatch.setattr(KVCacheManagerV2, "quarantine", hand_on)
    seed = next(seed for seed in range(20) if fails(shape_of(seed), events_of(seed)))
    with pytest.raises(AssertionError, match=rf"seed {seed}: [\s\S]* events are enough") as found:
        explore(seed)
    assert str(found.value).count("Event(name=") < 20


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_ten_thousand_seeds_or_twenty_minutes_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    end_s = time.monotonic() + _SLOW_S
    totals: Counter[str] = Counter()
    seed = _NUM_SEEDS
    while seed < _NUM_SEEDS + _SLOW_SEEDS and time.monotonic() < end_s:
        totals.update(counts_of(explore(seed)))
        seed += 1
    with capsys.disabled():
        print(f"\nhandoff explorer: {seed - _NUM_SEEDS} seeds, from {_NUM_SEEDS}; {dict(sorted(totals.items()))}")  # noqa: T201
    assert seed - _NUM_SEEDS >= 2000
