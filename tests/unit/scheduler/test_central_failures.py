"""Attempts that fail, workers that are lost, reports that come late (C7, C9)."""

import pytest

from scheduler.messages import Activated, CancelAttempt, ErrorKind, Failed, Finished, ReportBatch, Reserved, RunContext
from scheduler.spec import AttemptId, FinishReason
from tests.fakes.central_world import DOOR, CentralWorld, make_spec


def _read_all(world: CentralWorld) -> None:
    for name in world.workers:
        world.do(name, lambda worker: None)


def _bring_to(world: CentralWorld, stage: str) -> None:
    """Take request `a` to a stage of its life on c0 and g0."""
    world.submit(make_spec("a"))
    if stage != "context":
        world.compute_context("a")
    if stage == "deferred":
        world.defer("a")
    if stage in {"reserved", "active"}:
        world.reserve("a")
    if stage == "active":
        world.activate("a")


def test_a_failed_context_is_tried_again_elsewhere_under_a_new_name() -> None:
    world = CentralWorld("c0", "c1", "g0")
    world.submit(make_spec("a"))
    first = world.attempt("c0", "a")
    world.fail("a", "c0", retriable=True)
    second = world.attempt("c1", "a")
    assert first != second
    assert world.counter("retries") == 1
    assert world.notices == []


def test_after_three_attempts_a_context_that_keeps_failing_is_an_error() -> None:
    world = CentralWorld("c0", "g0")
    world.submit(make_spec("a"))
    for _ in range(3):
        world.fail("a", "c0", retriable=True)
    world.assert_idle()
    assert [(notice.kind, notice.retriable) for notice in world.notices] == [(ErrorKind.ENGINE, False)]
    assert len([c for c in world.commands("c0") if isinstance(c, RunContext)]) == 3


@pytest.mark.parametrize("name", ["c0", "g0"])
def test_a_fault_that_no_retry_can_mend_is_told_to_the_door_at_once(name: str) -> None:
    world = CentralWorld("c0", "g0")
    _bring_to(world, "context" if name == "c0" else "offered")
    world.fail("a", name, retriable=False)
    _read_all(world)
    world.assert_idle()
    assert [(notice.kind, notice.retriable) for notice in world.notices] == [(ErrorKind.ENGINE, False)]


@pytest.mark.parametrize("stage", ["offered", "reserved", "active"])
def test_a_failed_generation_half_is_for_the_door_to_resubmit_and_gives_the_lease_back(stage: str) -> None:
    world = CentralWorld("c0", "g0")
    _bring_to(world, stage)
    world.fail("a", "g0", retriable=True)
    # C3 of the catalogue: the context side learns it in the same step.
    has_cancel = any(isinstance(command, CancelAttempt) for command in world.commands("c0"))
    assert has_cancel == (stage != "active")
    _read_all(world)
    world.assert_idle()
    assert [notice.retriable for notice in world.notices] == [True]
    assert not world.workers["c0"].parts
    assert world.submit(make_spec("a", accepted=2)).refused == ()
    assert world.load("c0") == (1, 12)


def test_a_lost_context_worker_has_its_prompts_computed_elsewhere() -> None:
    world = CentralWorld("c0", "c1", "g0")
    world.submit(make_spec("a"), make_spec("b"))
    world.lose("c0")
    assert {world.workers["c1"].specs[attempt_id].uid for attempt_id in world.workers["c1"].parts} == {"a", "b"}
    assert world.notices == []


def test_requests_wait_for_a_lost_worker_and_run_on_its_next_life() -> None:
    world = CentralWorld("c0", "g0")
    world.submit(make_spec("a"))
    world.lose("c0")
    assert world.notices == []
    world.start("c0")
    world.compute_context("a")
    world.reserve("a")
    world.activate("a")
    world.finish("a")
    world.assert_idle()


@pytest.mark.parametrize("stage", ["offered", "deferred", "reserved"])
def test_a_context_worker_lost_before_its_pages_were_verified_ends_the_attempt_on_both_sides(stage: str) -> None:
    world = CentralWorld("c0", "g0")
    _bring_to(world, stage)
    world.lose("c0")
    _read_all(world)
    world.assert_idle()
    assert not world.workers["g0"].parts
    assert [(notice.kind, notice.retriable) for notice in world.notices] == [(ErrorKind.WORKER_LOST, True)]


def test_a_context_worker_lost_after_activation_changes_nothing() -> None:
    world = CentralWorld("c0", "g0")
    _bring_to(world, "active")
    world.lose("c0")
    assert world.notices == []
    world.finish("a")
    world.assert_idle()


@pytest.mark.parametrize("stage", ["offered", "reserved", "active"])
def test_a_lost_generation_worker_leaves_its_streams_to_the_door(stage: str) -> None:
    world = CentralWorld("c0", "g0", "g1")
    _bring_to(world, stage)
    world.lose("g0")
    _read_all(world)
    world.assert_idle()
    assert not world.workers["c0"].parts
    assert [(notice.kind, notice.retriable) for notice in world.notices] == [(ErrorKind.WORKER_LOST, True)]
    world.submit(make_spec("a", accepted=1))
    world.compute_context("a")
    assert world.attempt("g1", "a") in world.workers["g1"].parts


def test_a_lost_mixed_worker_leaves_its_streams_to_the_door() -> None:
    world = CentralWorld("m0")
    world.submit(make_spec("a"))
    world.lose("m0")
    world.assert_idle()
    assert [notice.retriable for notice in world.notices] == [True]


def test_a_lost_worker_is_sent_nothing_and_its_next_life_starts_empty() -> None:
    world = CentralWorld("c0", "g0")
    _bring_to(world, "active")
    world.lose("g0")
    assert world.central.lost_workers() == {"g0": 2}
    worker = world.start("g0")
    assert world.load("g0") == (0, 0)
    assert worker.received == []
    assert world.central.lost_workers() == {}


def test_commands_that_were_not_taken_yet_die_with_their_worker() -> None:
    world = CentralWorld("c0", "g0")
    world.central.submit(DOOR, [make_spec("a")], world.now_s)
    world.central.worker_lost(world.workers["c0"].name, "killed", world.now_s)
    assert world.central.take_commands() == ()


def test_a_leased_context_that_fails_takes_the_offer_back_and_is_not_cancelled_again() -> None:
    world = CentralWorld("c0", "g0")
    _bring_to(world, "offered")
    context, attempt_id = world.workers["c0"], world.attempt("c0", "a")
    failed = Failed(attempt_id, ErrorKind.TRANSFER, "pages lost", retriable=True)
    world.central.reports(ReportBatch(context.name, context.epoch, (failed,)), world.now_s)
    world.deliver()
    assert not [command for command in world.commands("c0") if isinstance(command, CancelAttempt)]
    assert [notice.retriable for notice in world.notices] == [True]
    _read_all(world)
    world.assert_idle()


def test_reports_and_heartbeats_of_an_earlier_life_are_counted_and_ignored() -> None:
    world = CentralWorld("c0", "g0")
    _bring_to(world, "active")
    attempt_id = world.attempt("g0", "a")
    old = world.workers["g0"]
    world.start("g0")
    old.finish(attempt_id)
    old.flush()
    old.beat()
    world.receive(old)
    assert world.counter("completed") == 0
    assert world.counter("stale_reports") == 1
    assert world.counter("stale_heartbeats") == 1
    assert world.counter("lost_workers") == 1


def test_a_fenced_life_cannot_register_again_but_the_live_one_may() -> None:
    world = CentralWorld("c0", "g0")
    old = world.lose("g0")
    assert not world.central.register_worker(old.registration(), world.now_s)
    assert not world.central.is_registered(old.name, old.epoch)
    new = world.start("g0")
    assert world.central.register_worker(new.registration(), world.now_s)
    assert not world.central.register_worker(old.registration(), world.now_s)
    assert world.central.is_registered(new.name, new.epoch)
    assert world.counter("refused_registrations") == 2


def test_a_lease_that_expires_before_anyone_took_the_request_sends_it_back_to_the_door() -> None:
    world = CentralWorld("c0", "g0")
    _bring_to(world, "deferred")
    attempt_id = world.attempt("c0", "a")
    world.do("c0", lambda worker: worker.end_lease(attempt_id, settled=False))
    world.assert_idle()
    assert [(notice.kind, notice.retriable) for notice in world.notices] == [(ErrorKind.TRANSFER, True)]


def test_a_lease_that_expires_during_the_transfer_is_the_readers_to_report() -> None:
    world = CentralWorld("c0", "g0")
    _bring_to(world, "reserved")
    attempt_id = world.attempt("c0", "a")
    world.do("c0", lambda worker: worker.end_lease(attempt_id, settled=False))
    assert world.notices == []
    world.fail("a", "g0", retriable=True)
    world.assert_idle()
    assert [notice.retriable for notice in world.notices] == [True]


def test_repeated_reports_and_reports_for_nobody_change_nothing() -> None:
    world = CentralWorld("c0", "g0")
    _bring_to(world, "active")
    attempt_id = world.attempt("g0", "a")
    context, generation = world.workers["c0"], world.workers["g0"]
    reports = (Reserved(attempt_id), Activated(attempt_id), Finished(AttemptId("1.99"), FinishReason.STOP))
    world.central.reports(ReportBatch(generation.name, generation.epoch, reports), world.now_s)
    world.central.reports(
        ReportBatch(context.name, context.epoch, (Finished(attempt_id, FinishReason.STOP),)), world.now_s
    )
    assert world.load("g0") == (1, 15)
    assert world.counter("late_reports") == 4
    assert world.counter("transfers") == 1
    world.finish("a")
    world.assert_idle()


def test_a_lost_door_ends_its_requests_everywhere_and_hears_nothing_more() -> None:
    world = CentralWorld("c0", "g0")
    _bring_to(world, "reserved")
    world.submit(make_spec("b"))
    world.central.door_lost(DOOR, world.now_s)
    world.deliver()
    _read_all(world)
    world.assert_idle()
    assert all(not worker.parts for worker in world.workers.values())
    assert world.notices == []
    assert world.counter("cancelled") == 2
