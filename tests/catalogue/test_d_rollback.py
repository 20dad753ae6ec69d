"""Kind D: what is left behind by work that did not happen."""

from collections.abc import Callable

import pytest

from configs import SchedulerConfig
from manager import KVCacheManagerV2, LayerGroupId, RefusalReason, Tier
from manager.transaction import CacheTransaction
from scheduler.messages import WorkerRole
from tests.conftest import Register
from tests.fakes.attempts import make_spec
from tests.fakes.cache_builders import compute_context, free, granted, make_geometry, refused
from tests.fakes.cache_request import FakeRequest
from tests.fakes.handoff_worker import WorldShape
from tests.fakes.handoff_world import HandoffWorld
from tests.fakes.iteration_worker import make_worker


def test_d01_only_members_of_the_committed_batch_start_transfers(monkeypatch: pytest.MonkeyPatch) -> None:
    world = HandoffWorld(WorldShape(pages=8))
    reader = world["generation-0"]
    streams = [world.submit(range(100 * n, 100 * n + 12), 3) for n in range(1, 5)]
    owner = world["context-0"]
    while owner.agent.num_leases < 2:
        world.deliver_door()
        owner.run_loop()
        world.deliver_from("context-0")
    before = reader.manager.snapshot()

    def failing_commit(transaction: CacheTransaction) -> None:
        transaction.rollback()
        message = "the plan was not committed"
        raise RuntimeError(message)

    with monkeypatch.context() as patch:
        patch.setattr(CacheTransaction, "commit", failing_commit)
        with pytest.raises(RuntimeError, match="not committed"):
            reader.run_loop()
    assert reader.agent.counters()["receives_started"] == reader.agent.num_reservations == 0
    assert reader.manager.snapshot() == before
    assert reader.window.taken_bytes == 0
    reader.run_loop()
    # Taken: as many as fit; those that were deferred in the same pass start nothing.
    assert reader.agent.counters()["receives_started"] == reader.agent.num_reservations > 0
    assert reader.scheduler.counters()["deferrals"] + reader.agent.num_reservations >= 2
    world.run()
    assert {stream.ends[0] for stream in streams} == {"finished"}
    world.settle_down()


def test_d01_a_context_whose_step_failed_is_not_leased() -> None:
    world = HandoffWorld()
    owner = world["context-0"]
    owner.engine.fails_in = 0
    stream = world.submit(range(100, 112), 3)
    world.deliver_door()
    owner.run_loop()
    assert owner.engine.num_steps == 1
    assert owner.agent.counters()["leases_granted"] == 0
    world.run()
    assert owner.agent.counters()["leases_granted"] == 1
    assert stream.ends == ["finished"]


def _tight_manager() -> tuple[KVCacheManagerV2, FakeRequest]:
    """A running request, a suspended-like cached prefix and little room."""
    geometry, config = make_geometry(8, max_sequences=3, resume_watermark=1.0)
    manager = KVCacheManagerV2(geometry, config)
    done = FakeRequest("done", list(range(12)))
    compute_context(manager, done)
    free(manager, done)
    running = FakeRequest("running", [50 + n for n in range(14)])
    compute_context(manager, running)
    return manager, running


_REFUSED: dict[str, Callable[[KVCacheManagerV2, FakeRequest], object]] = {
    "a context that does not fit": lambda manager, _: (
        granted(manager.prepare_context(FakeRequest("x", [*range(12), *range(80, 100)]))),
        refused(manager.resize_context(FakeRequest("x", [*range(12), *range(80, 100)]), 20)),
    ),
    "a generation with drafts": lambda manager, running: refused(
        manager.try_allocate_generation(_with_drafts(running, 40))
    ),
    "a reservation": lambda manager, _: refused(
        manager.prepare_disagg_gen_init(FakeRequest("y", [*range(12), *range(80, 100)]))
    ),
    "a suspension without a lower tier": lambda manager, running: refused(manager.suspend_request(running)),
}


def _with_drafts(request: FakeRequest, count: int) -> FakeRequest:
    request.num_draft_tokens = count
    return request


@pytest.mark.parametrize("attempt", _REFUSED)
def test_d02_a_refused_plan_leaves_the_manager_identical_in_everything(attempt: str, audited: Register) -> None:
    manager, running = _tight_manager()
    audited(manager)
    before = manager.snapshot()
    plan = manager.begin_plan()
    _REFUSED[attempt](manager, running)
    plan.rollback()
    after = manager.snapshot()
    assert after.free == before.free
    assert after.cached == before.cached, "victims keep their order"
    assert after.tree == before.tree
    assert after.caches == before.caches
    assert after == before


@pytest.mark.parametrize("windows", [(None,), (None, 8)])
def test_d04_a_received_request_has_its_prompt_computed_and_room_for_the_next_token(
    windows: tuple[int | None, ...], audited: Register
) -> None:
    geometry, config = make_geometry(32, windows=windows)
    manager = audited(KVCacheManagerV2(geometry, config))
    request = FakeRequest("a", list(range(22)))
    plan = manager.begin_plan()
    granted(manager.prepare_disagg_gen_init(request))
    plan.commit()
    assert manager.history_length(request.request_id) == 0
    complete = manager.begin_complete()
    manager.activate_disagg_gen(request)
    complete.commit()
    assert manager.history_length(request.request_id) == 22
    assert manager.capacity(request.request_id) >= 23
    full = [group for group in geometry.layer_groups if group.window is None]
    windowed = [group for group in geometry.layer_groups if group.window is not None]
    for group in full:
        assert (manager.block_table(request.request_id, group.layer_group_id) >= 0).sum() == 6
    for group in windowed:
        # The query at position 22 sees positions 15 to 22: blocks 3, 4 and 5.
        held = (manager.block_table(request.request_id, LayerGroupId(group.layer_group_id)) >= 0).tolist()
        assert held == [False, False, False, True, True, True]
    free(manager, request)


def test_d05_a_host_tier_that_is_full_at_the_second_suspension_drops_and_recomputes() -> None:
    worker = make_worker(
        WorkerRole.MIXED,
        num_pages=8,
        host_pages=2,
        config=SchedulerConfig(max_num_tokens=32, max_batch_size=4, chunk_unit_tokens=4),
        max_sequences=4,
    )
    for name in ("a", "b", "c", "d"):
        worker.context(make_spec(name, 7, max_tokens=18))
    worker.run_until_idle()
    counters = worker.scheduler.counters()
    assert counters["suspensions"] > 0, "one found room below"
    assert counters["recomputes"] > 0, "another did not, and was let go whole"
    assert [len(worker.tokens[name]) for name in "abcd"] == [18] * 4
    stats = worker.manager.stats()
    assert stats.tiers[Tier.HOST].in_use == stats.tiers[Tier.DEVICE].in_use == 0
    worker.manager.audit()


def test_d05_a_refused_suspension_moved_nothing(audited: Register) -> None:
    geometry, config = make_geometry(8, host_slots=1)
    manager = audited(KVCacheManagerV2(geometry, config))
    requests = [FakeRequest(name, [base + n for n in range(8)]) for name, base in (("a", 0), ("b", 50))]
    for request in requests:
        compute_context(manager, request)
    plan = manager.begin_plan()
    before = manager.snapshot()
    answer = refused(manager.suspend_request(requests[0]))
    assert (answer.reason, answer.needed, answer.available) == (RefusalReason.LOWER_TIERS_FULL, 2, 1)
    assert manager.snapshot() == before
    plan.rollback()
    for request in requests:
        free(manager, request)


def test_d09_a_failed_load_on_an_idle_worker_ends_without_waiting_for_arrivals() -> None:
    world = HandoffWorld(WorldShape(context_workers=0, generation_workers=0, mixed_workers=1, pages=10, host_pages=16))
    worker = world["mixed-0"]
    world.submit(range(100, 116), 2)
    world.run()
    for n in range(1, 4):
        world.submit(range(1000 * n, 1000 * n + 24), 8)
    world.run()
    stream = world.submit([*range(100, 116), 1], 4)
    world.deliver_door()
    worker.copies.fails_fill = True
    # From here on nothing arrives: only the loop turns, for as long as it says that it was busy.
    turns = 0
    while worker.run_loop():
        turns += 1
        assert turns < 50
    assert not worker.copies.fails_fill
    assert worker.scheduler.counters()["lost_pages"] == 1
    world.deliver_from("mixed-0")
    assert stream.ends == ["finished"]
    world.settle_down()
