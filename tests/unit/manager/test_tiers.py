"""Host and disk tiers: suspension, resume, demotion, promotion, and copies that fail (M3)."""

import numpy as np
import numpy.typing as npt
import pytest

from manager import CopyFailedError, KVCacheManagerV2, LogicError, PageCounts, RefusalReason, Tier, TierLevel
from manager.pools.copy_threads import CopyThread
from manager.pools.numpy_pools import NumpyPool
from tests.conftest import Register
from tests.fakes.cache_builders import free, granted, make_geometry, refused
from tests.fakes.cache_request import FakeRequest
from tests.fakes.page_contents import PageContents


class FailingPool(NumpyPool):
    """A pool whose reads or writes can be made to fail."""

    fails_reading = False
    fails_writing = False

    def read(self, slot: int, out: npt.NDArray[np.uint8]) -> None:
        if self.fails_reading:
            msg = "unreadable"
            raise OSError(msg)
        super().read(slot, out)

    def write(self, slot: int, source: npt.NDArray[np.uint8]) -> None:
        if self.fails_writing:
            msg = "no space"
            raise OSError(msg)
        super().write(slot, source)


class Tiered:
    """A manager with real pools, and the truth about their contents."""

    def __init__(
        self, device: int = 6, host: int = 6, disk: int = 0, max_sequences: int = 4, resume_watermark: float = 1.0
    ) -> None:
        geometry, config = make_geometry(
            device,
            host_slots=host,
            disk_slots=disk,
            head_dim=4,
            max_sequences=max_sequences,
            resume_watermark=resume_watermark,
        )
        self.contents = PageContents(geometry)
        for key, pool in self.contents.pools.items():
            self.contents.pools[key] = FailingPool(pool.num_slots, pool.slot_bytes)
        self.manager = KVCacheManagerV2(geometry, config, engine=CopyThread(self.contents.by_store()))

    def pool(self, tier: TierLevel) -> FailingPool:
        (pool,) = [pool for (level, _), pool in self.contents.pools.items() if level is tier]
        assert isinstance(pool, FailingPool)
        return pool

    def counts(self, tier: Tier) -> PageCounts:
        return self.manager.stats().tiers[tier]

    def compute(self, request: FakeRequest) -> None:
        plan = self.manager.begin_plan()
        history = granted(self.manager.prepare_context(request)).history_length
        granted(self.manager.resize_context(request, len(request.token_ids) - history))
        plan.commit()
        assert self.manager.finish_fills() == ()
        complete = self.manager.begin_complete()
        span = range(history, len(request.token_ids))
        self.contents.write(self.manager, request.request_id, request.token_ids, span)
        self.manager.advance(request, len(span))
        complete.commit()

    def suspend(self, request: FakeRequest) -> None:
        plan = self.manager.begin_plan()
        granted(self.manager.suspend_request(request))
        plan.commit()

    def resume(self, request: FakeRequest) -> None:
        plan = self.manager.begin_plan()
        granted(self.manager.prepare_context(request))
        plan.commit()
        assert self.manager.finish_fills() == ()
        self.contents.check(self.manager, request.request_id, request.token_ids)


@pytest.fixture
def tiered(audited: Register) -> Tiered:
    made = Tiered()
    audited(made.manager)
    return made


def test_a_suspended_cache_comes_back_with_its_bytes(tiered: Tiered) -> None:
    manager, request = tiered.manager, FakeRequest("a", list(range(10)))
    tiered.compute(request)
    plan = manager.begin_plan()
    grant = granted(manager.suspend_request(request))
    assert (grant.num_pages(TierLevel.HOST), grant.num_pages()) == (3, 0)
    plan.commit()
    assert manager.is_suspended(request.request_id)
    assert tiered.counts(Tier.DEVICE) == PageCounts(total=6, free=6)
    assert tiered.counts(Tier.HOST).in_use == 3
    with pytest.raises(LogicError, match="no index slot"):
        manager.index_slot(request.request_id)
    tiered.compute(FakeRequest("b", [5] * 20))
    free(manager, FakeRequest("b"))
    tiered.resume(request)
    assert tiered.counts(Tier.HOST).in_use == 0


def test_through_host_and_disk_and_back(audited: Register) -> None:
    tiered = Tiered(device=6, host=2, disk=6)
    audited(tiered.manager)
    request = FakeRequest("a", list(range(17)))
    tiered.compute(request)
    tiered.suspend(request)
    assert tiered.counts(Tier.HOST).in_use == 2
    assert tiered.counts(Tier.DISK).in_use == 3
    tiered.resume(request)


def test_a_decode_resumes_and_grows_as_one(tiered: Tiered) -> None:
    manager, request = tiered.manager, FakeRequest("a", list(range(8)))
    tiered.compute(request)
    tiered.suspend(request)
    request.token_ids.append(8)
    plan = manager.begin_plan()
    before = manager.availability()
    grant = granted(manager.try_allocate_generation(request))
    assert (grant.num_pages(), grant.index_slots, grant.capacity, grant.reused_tokens) == (3, 1, 12, 8)
    assert before.pages[manager.geometry.pool_groups[0].pool_group_id] == 6
    manager.revert_allocate_generation(request)
    assert manager.is_suspended(request.request_id)
    manager.audit()
    granted(manager.try_allocate_generation(request))
    plan.commit()


def test_a_page_that_an_active_cache_needs_stays_on_the_device(tiered: Tiered) -> None:
    first, second = FakeRequest("a", list(range(9))), FakeRequest("b", list(range(9)))
    tiered.compute(first)
    tiered.compute(second)
    tiered.suspend(first)
    assert tiered.counts(Tier.DEVICE).in_use == 3
    assert tiered.counts(Tier.HOST).in_use == 1
    free(tiered.manager, second)
    assert tiered.counts(Tier.DEVICE).in_use == 0
    assert tiered.counts(Tier.HOST).in_use == 3
    tiered.resume(first)


def test_evicted_blocks_are_found_again_in_the_host_tier(tiered: Tiered) -> None:
    manager = tiered.manager
    tiered.compute(FakeRequest("a", list(range(9))))
    free(manager, FakeRequest("a"))
    tiered.compute(FakeRequest("b", [7] * 24))
    assert tiered.counts(Tier.HOST).cached == 2
    free(manager, FakeRequest("b"))
    again = FakeRequest("c", [*range(8), 3])
    plan = manager.begin_plan()
    grant = granted(manager.prepare_context(again))
    assert (grant.reused_tokens, grant.num_pages()) == (8, 2)
    plan.commit()
    assert manager.finish_fills() == ()
    tiered.contents.check(manager, again.request_id, again.token_ids)


def test_what_the_lower_tiers_cannot_take_is_refused_whole(audited: Register) -> None:
    tiered = Tiered(device=6, host=3)
    manager = audited(tiered.manager)
    first, second = FakeRequest("a", list(range(12))), FakeRequest("b", [7] * 5)
    tiered.compute(first)
    tiered.compute(second)
    plan = manager.begin_plan()
    granted(manager.suspend_request(first))
    before = manager.snapshot()
    refusal = refused(manager.suspend_request(second))
    assert (refusal.reason, refusal.needed, refusal.available) == (RefusalReason.LOWER_TIERS_FULL, 2, 0)
    assert manager.snapshot() == before
    plan.commit()


def test_both_tiers_full_while_one_resumes_and_another_is_suspended(audited: Register) -> None:
    """The slots that a resume frees below are free in the next transaction only, so that moves form no cycle."""
    tiered = Tiered(device=4, host=4)
    manager = audited(tiered.manager)
    first, second = FakeRequest("a", list(range(16))), FakeRequest("b", [7] * 16)
    tiered.compute(first)
    tiered.suspend(first)
    tiered.compute(second)
    plan = manager.begin_plan()
    assert refused(manager.prepare_context(first)).reason is RefusalReason.OUT_OF_PAGES
    assert refused(manager.suspend_request(second)).reason is RefusalReason.LOWER_TIERS_FULL
    manager.pause_for_recompute(second)
    granted(manager.prepare_context(first))
    plan.commit()
    assert manager.finish_fills() == ()
    tiered.contents.check(manager, first.request_id, first.token_ids)


def test_a_host_tier_full_of_cached_pages_still_takes_a_suspension(audited: Register) -> None:
    tiered = Tiered(device=8, host=8)
    manager = audited(tiered.manager)
    for number in range(6):
        request = FakeRequest(f"old{number}", [number] * 12)
        tiered.compute(request)
        free(manager, request)
    assert tiered.counts(Tier.HOST).free >= 1
    running = FakeRequest("a", [9, 9, 9])
    tiered.compute(running)
    tiered.suspend(running)
    tiered.resume(running)


def test_resume_waits_below_the_watermark_unless_nothing_runs(audited: Register) -> None:
    tiered = Tiered(device=6, host=6, resume_watermark=0.5)
    manager = audited(tiered.manager)
    first, second = FakeRequest("a", list(range(8))), FakeRequest("b", [7] * 8)
    tiered.compute(first)
    tiered.suspend(first)
    tiered.compute(second)
    plan = manager.begin_plan()
    assert refused(manager.prepare_context(first)).reason is RefusalReason.OVER_RESUME_WATERMARK
    plan.commit()
    free(manager, second)
    tiered.resume(first)


@pytest.mark.parametrize(("tier", "room"), [(TierLevel.HOST, 4), (TierLevel.DISK, 2)])
def test_a_copy_that_fails_at_stage_rolls_the_plan_back_and_closes_the_tier(
    audited: Register, tier: TierLevel, room: int
) -> None:
    tiered = Tiered(device=6, host=2, disk=4)
    manager = audited(tiered.manager)
    request = FakeRequest("a", list(range(20)))
    tiered.compute(request)
    before = manager.snapshot()
    tiered.pool(tier).fails_writing = True
    plan = manager.begin_plan()
    granted(manager.suspend_request(request))
    with pytest.raises(CopyFailedError, match="no space"):
        plan.commit()
    assert manager.snapshot() == before
    plan = manager.begin_plan()
    refusal = refused(manager.suspend_request(request))
    assert (refusal.needed, refusal.available) == (5, room)
    plan.rollback()


def test_a_fill_that_fails_costs_its_readers_their_caches_and_nobody_else(tiered: Tiered) -> None:
    manager = tiered.manager
    lost, other = FakeRequest("a", list(range(9))), FakeRequest("b", [7] * 5)
    tiered.compute(lost)
    tiered.suspend(lost)
    tiered.compute(other)
    plan = manager.begin_plan()
    granted(manager.prepare_context(lost))
    sharer = FakeRequest("c", list(range(9)))
    granted(manager.prepare_context(sharer))
    tiered.pool(TierLevel.HOST).fails_reading = True
    plan.commit()
    assert manager.finish_fills() == (lost.request_id, sharer.request_id)
    tiered.pool(TierLevel.HOST).fails_reading = False
    assert not manager.has_cache(lost.request_id)
    tiered.contents.check(manager, other.request_id, other.token_ids)
    plan = manager.begin_plan()
    assert granted(manager.prepare_context(lost)).reused_tokens == 0
    plan.commit()
    manager.close()


def test_a_reservation_cannot_be_suspended(tiered: Tiered) -> None:
    manager, request = tiered.manager, FakeRequest("a", list(range(5)))
    plan = manager.begin_plan()
    granted(manager.prepare_disagg_gen_init(request))
    with pytest.raises(LogicError, match="being filled"):
        manager.suspend_request(request)
    plan.commit()
