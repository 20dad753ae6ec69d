"""Kind B: deadlock, admission and preemption."""

from dataclasses import replace

import pytest

from configs import CentralConfig, SchedulerConfig, SchedulingPolicy, TransferConfig
from manager import Epoch, RequestId, Tier
from scheduler.errors import InvalidConfiguration
from scheduler.kv_cache_v2_scheduler import KVCacheV2Scheduler
from scheduler.messages import ErrorKind, WorkerRole
from scheduler.policy import CacheShape
from tests.fakes.attempts import make_spec
from tests.fakes.cache_builders import make_geometry, refused
from tests.fakes.cache_request import FakeRequest
from tests.fakes.call_log import CallLog, Injected
from tests.fakes.handoff_worker import HandoffWorker, WorldShape
from tests.fakes.handoff_world import HandoffWorld
from tests.fakes.iteration_worker import drawn_token, make_worker
from tests.fakes.small_cache import make_manager, shape_of
from tests.fakes.transfer_transport import GatedTransport

PROMPT = range(100, 112)


def stall(worker: HandoffWorker) -> GatedTransport:
    assert isinstance(worker.transport, GatedTransport)
    worker.transport.may_finish = worker.transport.may_stop = False
    return worker.transport


def test_b01_a_queue_head_that_does_not_fit_never_hides_a_request_that_holds_pages() -> None:
    config = SchedulerConfig(max_num_tokens=8, max_batch_size=4, chunk_unit_tokens=4, arrivals_per_priority=64)
    worker = make_worker(WorkerRole.MIXED, num_pages=10, max_sequences=4, config=config)
    holder = worker.context(make_spec("holder", 24, max_tokens=6))
    worker.step()
    head = worker.context(make_spec("head", 30, max_tokens=6, priority=1))
    assert worker.scheduler.waiting == [head]
    done = worker.manager.history_length(holder.request_id)
    for _ in range(30):
        worker.step()
        if "holder" in worker.tokens and len(worker.tokens["holder"]) == 6:
            break
        if worker.manager.has_cache(holder.request_id):
            assert worker.manager.history_length(holder.request_id) > done, "it advances in every pass"
            done = worker.manager.history_length(holder.request_id)
    assert len(worker.tokens["holder"]) == 6
    worker.run_until_idle()
    assert len(worker.tokens["head"]) == 6


def test_b05_what_is_reserved_never_takes_the_room_that_running_requests_grow_into() -> None:
    world = HandoffWorld(WorldShape(pages=9))
    # Each is received in two blocks and grows into a third, as all who run before it.
    streams = [world.submit(range(100 * n, 100 * n + 7), 5) for n in range(1, 9)]
    world.run()
    assert {stream.ends[0] for stream in streams} == {"finished"}
    counters = world["generation-0"].scheduler.counters()
    assert counters["deferrals"] > 0
    assert counters["suspensions"] == counters["recomputes"] == 0
    world.settle_down()


def test_b06_receives_are_serviced_while_the_readers_compute_stands_still() -> None:
    world = HandoffWorld()
    owner, reader = world["context-0"], world["generation-0"]
    stream = world.submit(PROMPT)
    world.turns_until(lambda: reader.agent.num_active == 1)
    for _ in range(6):
        reader.poll()  # its loop is in a long step
        world.answer_all()
    assert reader.agent.num_active == 0
    assert reader.agent.counters()["receives_verified"] == 1
    owner.run_loop()
    assert owner.leftovers() == [], "the owner has its pages back"
    world.run()
    assert stream.ends == ["finished"]


def test_b07_slots_and_admission_agree_at_start_up_and_running_out_is_no_exception() -> None:
    geometry, cache = make_geometry(8, max_sequences=2)
    manager = make_manager(num_pages=8, max_sequences=2)
    config = SchedulerConfig(max_batch_size=3, max_num_tokens=16, chunk_unit_tokens=4)
    with pytest.raises(InvalidConfiguration, match="max_batch_size=3"):
        KVCacheV2Scheduler(config, manager, WorkerRole.MIXED, shape_of(manager))
    assert CacheShape.of(geometry).max_request_tokens
    assert cache.max_sequences == 2
    worker = make_worker(WorkerRole.GENERATION, num_pages=16, max_sequences=2)
    offers = [worker.offer(make_spec(name, 4, max_tokens=3)) for name in "abcd"]
    output = worker.step()
    assert list(output.reserved) == offers[:2]
    assert [deferral.reason for _, deferral in output.deferred] == ["batch_full", "older_request_waits"]
    worker.settle()


def test_b08_dead_transfers_are_swept_though_nothing_new_is_sent() -> None:
    world = HandoffWorld(replace(WorldShape(is_gated=True), pages=12))
    owner, reader = world["context-0"], world["generation-0"]
    transport = stall(reader)
    for n in range(3):
        world.submit(range(100 * n, 100 * n + 16), 2)
    world.turns_until(lambda: owner.agent.num_leases == 3 and bool(transport.active))
    world.kill("generation-0", num_sent=0)
    world.advance(2.0)
    healthy, reason = world.central.health()
    assert not healthy
    assert "generation" in reason
    num_steps = owner.engine.num_steps
    # The commands of the central scheduler are lost as well: only the deadline is left.
    owner.loop._inbox.clear()
    world.now_s += 10.0
    owner.poll()
    owner.run_loop()
    assert owner.engine.num_steps == num_steps
    assert owner.leftovers() == []
    world.supervise()
    assert world.central.health() == (True, "")
    world.run()
    world.settle_down()


def test_b09_batch_size_one_and_a_pool_of_one_request_serve_a_stream_of_requests() -> None:
    config = SchedulerConfig(max_num_tokens=16, max_batch_size=1, chunk_unit_tokens=4)
    world = HandoffWorld(WorldShape(pages=4, max_sequences=1, scheduler=config))
    streams = [world.submit(range(100 * n, 100 * n + 11), 5) for n in range(8)]
    world.run()
    assert [stream.ends for stream in streams] == [["finished"]] * 8
    world.settle_down()


@pytest.mark.parametrize("call", range(5))
def test_b10_an_exit_between_prepare_and_commit_leaves_nothing_and_the_next_attempt_succeeds(call: int) -> None:
    logs: list[CallLog] = []

    def wrap(manager: object) -> CallLog:
        logs.append(CallLog(manager))  # type: ignore[arg-type]
        return logs[0]

    worker = make_worker(WorkerRole.MIXED, num_pages=8, max_sequences=4, wrap=wrap)
    worker.context(make_spec("warm", tuple(range(100, 112)), max_tokens=1))
    worker.run_until_idle()
    request = worker.context(make_spec("a", (*range(100, 112), 7), max_tokens=3))
    before = worker.manager.snapshot()
    logs[0].calls.clear()
    logs[0].aim(raise_in=call)
    with pytest.raises(Injected):
        worker.schedule()
    assert worker.manager.snapshot() == before
    assert not worker.manager.has_cache(request.request_id)
    assert ("prepare_context" in logs[0].calls) == (call > 1)
    logs[0].aim()
    worker.complete(worker.schedule())
    worker.run_until_idle()
    assert worker.tokens["a"] == [drawn_token("a", at) for at in range(3)]


def test_b11_a_slow_send_is_no_deadlock_and_pages_that_nobody_will_return_are() -> None:
    worker = make_worker(WorkerRole.CONTEXT, num_pages=4, max_sequences=4)
    worker.context(make_spec("sent", 16, max_tokens=4))
    worker.step()
    worker.context(make_spec("waits", 16, max_tokens=4))
    for _ in range(20):
        output = worker.schedule()
        assert (output.has_step, output.deadlock) == (False, None), "a send in flight returns its pages"
    # The send is gone from the scheduler's books while its pages are still held.
    lease_id = worker.leases["sent"]
    worker.scheduler._table.leased.pop(lease_id)
    worker.scheduler._note_release()
    deadlock = worker.schedule().deadlock
    assert deadlock is not None, "in the very next pass"
    assert "1 waiting contexts" in deadlock
    complete = worker.manager.begin_complete()
    worker.manager.end_lease(lease_id)
    complete.commit()
    worker.scheduler._note_release()
    worker.step()
    assert worker.leases["waits"] != lease_id


def test_b12_a_request_larger_than_the_pool_is_refused_at_the_door_with_the_numbers() -> None:
    world = HandoffWorld(WorldShape(pages=8))
    small = world.submit(range(8), 8)
    large = world.submit(range(8), 30)  # 38 tokens; a pool holds 32
    world.run()
    assert (small.ends, large.kind) == (["finished"], ErrorKind.NEVER_FITS)
    assert "needs 38 tokens; the largest generation worker takes 32" in large.ends[0]
    assert world.counter("refused") == 1


def test_b13_drafts_without_pages_are_skipped_and_the_primary_is_untouched() -> None:
    worker = make_worker(WorkerRole.MIXED, num_pages=5, max_sequences=4)
    request = worker.context(make_spec("a", 15, max_tokens=5))
    other = worker.context(make_spec("b", 3, max_tokens=1))
    request.num_draft_tokens = 8
    worker.step()
    assert other.is_terminal
    request.num_draft_tokens = 8
    plan = worker.manager.begin_plan()
    before = worker.manager.snapshot()
    wanted = FakeRequest(str(request.request_id), list(request.token_ids))
    wanted.num_draft_tokens = 8
    refused(worker.manager.try_allocate_generation(wanted))
    assert worker.manager.snapshot() == before
    plan.rollback()
    output = worker.schedule()
    assert output.generations == (request,)
    assert output.draft_lengths[0] < 8
    worker.complete(output)
    worker.run_until_idle()
    assert worker.tokens["a"] == [drawn_token("a", at) for at in range(5)]


@pytest.mark.parametrize("host_pages", [0, 8])
def test_b15_in_a_storm_of_preemptions_somebody_advances_in_every_two_passes(host_pages: int) -> None:
    config = SchedulerConfig(
        max_num_tokens=16, max_batch_size=6, chunk_unit_tokens=4, policy=SchedulingPolicy.MAX_UTILIZATION
    )
    worker = make_worker(WorkerRole.MIXED, num_pages=7, max_sequences=6, host_pages=host_pages, config=config)
    names = [f"r{n}" for n in range(8)]
    for name in names:
        worker.context(make_spec(name, 5, max_tokens=18))
    still = 0
    for _ in range(800):
        if not worker.scheduler.has_work:
            break
        before = sum(map(len, worker.tokens.values()))
        rows = worker.step().num_rows
        still = 0 if rows or sum(map(len, worker.tokens.values())) > before else still + 1
        assert still < 2
    counters = worker.scheduler.counters()
    assert counters["suspensions"] + counters["recomputes"] > 3, "it was a storm"
    assert [len(worker.tokens[name]) for name in names] == [18] * 8


def test_b16_with_handoffs_pending_reservations_are_whole_and_in_order() -> None:
    worker = make_worker(WorkerRole.GENERATION, num_pages=8, max_sequences=8)
    for name in ("a", "b", "c", "d"):
        worker.offer(make_spec(name, 11, max_tokens=3))
    output = worker.step()
    assert [request.attempt_id for request in output.reserved] == ["a", "b"]
    assert [request.attempt_id for request, _ in output.deferred] == ["c", "d"]
    for request in output.reserved:
        assert len(worker.manager.pages_to_fill(request.request_id)) == 3, "every page of the prompt, at once"
    assert not worker.manager.has_cache(RequestId("c"))
    assert worker.manager.stats().tiers[Tier.DEVICE].reserved == worker.manager.stats().tiers[Tier.DEVICE].in_use
    worker.settle()


def test_b17_a_sender_that_never_completes_costs_its_victim_its_deadline_and_nobody_else_anything() -> None:
    transfer = TransferConfig(lease_duration_s=3.0, reservation_duration_s=5.0)
    world = HandoffWorld(WorldShape(is_gated=True, transfer=transfer, central=CentralConfig(request_deadline_s=50.0)))
    reader = world["generation-0"]
    running = world.submit(range(8), 40)
    world.turns_until(lambda: len(running.accepted) > 2)
    transport = stall(reader)
    victim = world.submit(range(200, 212), 3)
    world.turns_until(lambda: bool(transport.active))
    began_s, num_tokens = world.now_s, len(running.accepted)
    while victim.num_resubmissions == 0:
        assert world.now_s - began_s < 6.0, "its deadline"
        world.turn()
        world.advance(0.5)
    assert len(running.accepted) > num_tokens + 5, "the other one went on"
    transport.may_finish = transport.may_stop = True
    world.run()
    assert (running.ends, victim.ends, running.num_resubmissions) == (["finished"], ["finished"], 0)
    world.settle_down()
    assert reader.identity.epoch == Epoch(2), "nobody had to be restarted"
