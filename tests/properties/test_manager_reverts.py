"""A plan in which some requests are reverted equals one that never tried them, up to the names of slots (M2)."""

from collections.abc import Sequence
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from manager import Grant, KVCacheManagerV2, Refusal
from tests.fakes.cache_builders import compute_context, free, make_manager
from tests.fakes.cache_request import FakeRequest


@dataclass(frozen=True)
class Attempt:
    """One admission in the plan; a reverted one is taken back after `delay` further attempts."""

    family: int
    length: int
    is_reverted: bool
    delay: int
    is_offer: bool


ATTEMPTS = st.lists(
    st.builds(Attempt, st.integers(0, 3), st.integers(1, 18), st.booleans(), st.integers(0, 3), st.booleans()),
    min_size=1,
    max_size=7,
)
OLD = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 12), st.booleans()), max_size=6)


def build(old: Sequence[tuple[int, int, bool]]) -> KVCacheManagerV2:
    manager = make_manager(14, max_sequences=12)
    for number, (family, length, is_kept) in enumerate(old):
        request = FakeRequest(f"old{number}", [family] * length, priority=number % 2)
        plan = manager.begin_plan()
        fits = isinstance(manager.prepare_context(request), Grant) and isinstance(
            manager.resize_context(request, length), Grant
        )
        plan.rollback()
        if fits:
            compute_context(manager, request)
            if not is_kept:
                free(manager, request)
    return manager


def play(manager: KVCacheManagerV2, attempts: Sequence[Attempt], *, with_reverted: bool) -> list[Grant | Refusal]:
    """Run the plan; returns the answers to the attempts that are kept."""
    answers: list[Grant | Refusal] = []
    due: list[tuple[int, FakeRequest]] = []
    plan = manager.begin_plan()
    for number, attempt in enumerate(attempts):
        if not attempt.is_reverted or with_reverted:
            request = FakeRequest(f"new{number}", [attempt.family] * attempt.length)
            given_now = admit(manager, request, is_offer=attempt.is_offer)
            if attempt.is_reverted:
                due.append((number + attempt.delay, request))
            else:
                answers += given_now
        for at, request in [entry for entry in due if entry[0] <= number]:
            due.remove((at, request))
            manager.revert_allocate_generation(request)
            manager.audit()
    for _, request in due:
        manager.revert_allocate_context(request)
    plan.commit()
    manager.audit()
    return answers


def admit(manager: KVCacheManagerV2, request: FakeRequest, *, is_offer: bool) -> list[Grant | Refusal]:
    if is_offer:
        return [manager.prepare_disagg_gen_init(request)]
    claim = manager.prepare_context(request)
    if isinstance(claim, Refusal):
        return [claim]
    return [claim, manager.resize_context(request, len(request.token_ids) - claim.history_length)]


@settings(max_examples=300)
@given(OLD, ATTEMPTS)
def test_reverted_requests_leave_no_trace(old: list[tuple[int, int, bool]], attempts: list[Attempt]) -> None:
    """Only where the others were given the same: a block dropped for a reverted request cannot be matched before."""
    with_reverted, without = build(old), build(old)
    answers = play(with_reverted, attempts, with_reverted=True)
    expected = play(without, attempts, with_reverted=False)
    if answers == expected:
        assert with_reverted.snapshot().without_slot_names() == without.snapshot().without_slot_names()
