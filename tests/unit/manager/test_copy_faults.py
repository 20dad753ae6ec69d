"""Copies that fail, in every direction: at stage the transaction is undone, at fill its readers start again (M3)."""

from collections.abc import Callable

import pytest

from manager import CopyFailedError, Tier, TierLevel, Transaction
from tests.conftest import Register
from tests.fakes.cache_builders import free, granted, refused
from tests.fakes.cache_request import FakeRequest
from tests.fakes.tiered import Tiered


def suspending(tiered: Tiered) -> Callable[[], Transaction]:
    """A plan that moves five pages down, as far as there is room."""
    request = FakeRequest("a", list(range(20)))
    tiered.compute(request)

    def plan() -> Transaction:
        transaction = tiered.manager.begin_plan()
        granted(tiered.manager.suspend_request(request))
        return transaction

    return plan


def evicting(tiered: Tiered) -> Callable[[], Transaction]:
    """A plan that takes the places of cached pages, which go down."""
    old, new = FakeRequest("old", [1] * 24), FakeRequest("new", [2] * 8)
    tiered.compute(old)
    free(tiered.manager, old)

    def plan() -> Transaction:
        transaction = tiered.manager.begin_plan()
        granted(tiered.manager.prepare_context(new))
        granted(tiered.manager.resize_context(new, 8))
        return transaction

    return plan


def trimming(tiered: Tiered) -> Callable[[], Transaction]:
    """Any transaction, while the host tier has no slot free: its oldest cached page goes to the disk."""
    evicting(tiered)().commit()
    assert tiered.counts(Tier.HOST).free == 0
    return tiered.manager.begin_complete


Setup = Callable[[Tiered], Callable[[], Transaction]]
STAGES: dict[str, tuple[Setup, dict[str, int], TierLevel]] = {
    "suspend from device to host": (suspending, {"host": 6}, TierLevel.HOST),
    "suspend from device to host, the rest to disk": (suspending, {"host": 2, "disk": 4}, TierLevel.HOST),
    "suspend from device to disk, the rest to host": (suspending, {"host": 2, "disk": 4}, TierLevel.DISK),
    "suspend from device to disk": (suspending, {"host": 0, "disk": 6}, TierLevel.DISK),
    "evict from device to host": (evicting, {"host": 6}, TierLevel.HOST),
    "evict from device to disk": (evicting, {"host": 0, "disk": 6}, TierLevel.DISK),
    "trim from host to disk": (trimming, {"host": 2, "disk": 6}, TierLevel.DISK),
}


@pytest.mark.parametrize("direction", STAGES)
def test_a_copy_that_fails_at_stage_undoes_its_transaction_and_closes_the_tier(
    audited: Register, direction: str
) -> None:
    setup, sizes, failing = STAGES[direction]
    tiered = Tiered(device=6, **sizes)
    manager = audited(tiered.manager)
    begin = setup(tiered)
    before = manager.snapshot()
    tiered.pool(failing).fails_writing = True
    transaction = begin()
    with pytest.raises(CopyFailedError, match="no space"):
        transaction.commit()
    assert manager.snapshot() == before
    manager.audit()
    used = tiered.counts(Tier[failing.name])
    if setup is suspending:
        plan = manager.begin_plan()
        refusal = refused(manager.suspend_request(FakeRequest("a")))
        assert (refusal.needed, refusal.available) == (5, sum(sizes.values()) - used.total)
        plan.rollback()
    else:
        begin().commit()
        assert tiered.counts(Tier[failing.name]) == used


def resuming(tiered: Tiered) -> tuple[FakeRequest, int]:
    """A suspended request whose pages are below; nothing of it is cached for a new start."""
    request = FakeRequest("lost", list(range(9)))
    tiered.compute(request)
    tiered.suspend(request)
    return request, 0


def cloning(tiered: Tiered) -> tuple[FakeRequest, int]:
    """A request that begins with a cached block, and then within another one."""
    old = FakeRequest("old", list(range(8)))
    tiered.compute(old)
    free(tiered.manager, old)
    return FakeRequest("lost", [0, 1, 2, 3, 4, 5, 9, 9, 9]), 6


FILLS: dict[str, tuple[Callable[[Tiered], tuple[FakeRequest, int]], dict[str, int], TierLevel]] = {
    "host to device": (resuming, {"host": 6}, TierLevel.HOST),
    "disk to device": (resuming, {"host": 0, "disk": 6}, TierLevel.DISK),
    "device to device": (cloning, {"host": 0}, TierLevel.DEVICE),
}


@pytest.mark.parametrize("direction", FILLS)
def test_a_fill_that_fails_costs_its_readers_their_caches_and_nobody_else(audited: Register, direction: str) -> None:
    setup, sizes, failing = FILLS[direction]
    tiered = Tiered(device=8, **sizes)
    manager = audited(tiered.manager)
    lost, reused = setup(tiered)
    other = FakeRequest("other", [7] * 5)
    tiered.compute(other)
    plan = manager.begin_plan()
    granted(manager.prepare_context(lost))
    readers = [lost]
    if setup is resuming:
        readers.append(FakeRequest("sharer", list(range(9))))
        granted(manager.prepare_context(readers[-1]))
    tiered.pool(failing).fails_reading = True
    plan.commit()
    assert manager.finish_fills() == tuple(reader.request_id for reader in readers)
    tiered.pool(failing).fails_reading = False
    assert not any(manager.has_cache(reader.request_id) for reader in readers)
    manager.audit()
    tiered.contents.check(manager, other.request_id, other.token_ids)
    plan = manager.begin_plan()
    assert granted(manager.prepare_context(lost)).reused_tokens == reused
    plan.commit()
    assert manager.finish_fills() == ()
    manager.close()
