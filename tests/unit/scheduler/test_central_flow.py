"""The life of a request through the central scheduler, context first, in a mixed worker, and cancelled."""

import pytest

from configs import CentralConfig
from manager import LeaseId
from scheduler.messages import CancelAttempt, OfferGeneration, RenewLeases, RunContext, RunLocal
from tests.fakes.central_world import CentralWorld, make_spec


def test_a_request_is_computed_offered_transferred_and_completed() -> None:
    world = CentralWorld("c0", "g0")
    assert world.submit(make_spec("a")).refused == ()
    assert world.load("c0") == (1, 10)
    world.compute_context("a")
    assert world.load("c0") == (0, 0)
    assert world.load("g0") == (1, 15)
    world.reserve("a")
    world.activate("a")
    world.finish("a")
    world.assert_idle()
    assert [type(command) for command in world.commands("c0")] == [RunContext]
    assert [type(command) for command in world.commands("g0")] == [OfferGeneration]
    assert world.counter("completed") == world.counter("transfers") == 1
    assert world.counter("ticket_bytes") == 1000
    assert world.notices == []


def test_the_offer_carries_the_same_attempt_the_whole_spec_and_the_handoff() -> None:
    world = CentralWorld("c0", "g0", term=9)
    spec = make_spec("a", max_tokens=40)
    world.submit(spec)
    world.compute_context("a")
    run, offer = world.commands("c0")[0], world.commands("g0")[0]
    assert isinstance(run, RunContext)
    assert isinstance(offer, OfferGeneration)
    assert run.attempt_id == offer.attempt_id == "9.1"
    # E6: the limits of the context hop are the request's own.
    assert run.spec == offer.spec == spec
    assert offer.handoff is not None
    assert offer.handoff.first_token_id == 7


def test_a_request_finished_by_its_first_token_is_never_offered() -> None:
    world = CentralWorld("c0", "g0")
    world.submit(make_spec("a"))
    attempt_id = world.attempt("c0", "a")
    world.do("c0", lambda worker: worker.finish_by_first_token(attempt_id))
    world.assert_idle()
    assert world.commands("g0") == []
    assert world.counter("completed") == 1


def test_a_mixed_worker_computes_both_phases() -> None:
    world = CentralWorld("m0")
    world.submit(make_spec("a"))
    assert [type(command) for command in world.commands("m0")] == [RunLocal]
    assert world.load("m0") == (1, 15)
    world.finish("a", "m0")
    world.assert_idle()


def test_contexts_start_in_order_of_arrival_up_to_the_limit_of_each_worker() -> None:
    world = CentralWorld("c0", "c1", "g0", config=CentralConfig(max_running_per_context_worker=1))
    world.submit(*(make_spec(uid) for uid in "abcd"))
    assert [world.load("c0")[0], world.load("c1")[0]] == [1, 1]
    world.compute_context("b", "c1")
    assert world.attempt("c1", "c") in world.workers["c1"].parts
    world.compute_context("a")
    assert world.attempt("c0", "d") in world.workers["c0"].parts


def test_a_request_of_higher_priority_is_served_before_older_ones() -> None:
    world = CentralWorld("c0", "g0", config=CentralConfig(max_running_per_context_worker=1))
    world.submit(make_spec("a"))
    world.submit(make_spec("b"), make_spec("urgent", priority=1))
    world.compute_context("a")
    assert world.attempt("c0", "urgent") in world.workers["c0"].parts


def test_urgent_requests_that_keep_coming_do_not_keep_an_older_one_waiting_for_ever() -> None:
    config = CentralConfig(max_running_per_context_worker=1, arrivals_per_priority=3)
    world = CentralWorld("c0", "g0", config=config)
    world.submit(make_spec("first"))
    world.submit(make_spec("patient"))
    served, running = [], "first"
    for number in range(6):
        world.submit(make_spec(f"urgent{number}", priority=1))
        world.compute_context(running)
        (attempt_id,) = (held for held, part in world.workers["c0"].parts.items() if part == "context")
        running = world.workers["c0"].specs[attempt_id].uid
        served.append(running)
    assert served == ["urgent0", "urgent1", "patient", "urgent2", "urgent3", "urgent4"]


def test_submitting_an_open_request_again_changes_nothing() -> None:
    world = CentralWorld("c0", "g0")
    world.submit(make_spec("a"))
    assert world.submit(make_spec("a", accepted=1)).refused == ()
    assert len(world.commands("c0")) == 1
    assert world.counter("submitted") == 1


@pytest.mark.parametrize("stage", ["queued", "context", "offered", "deferred", "reserved", "active"])
def test_a_cancel_in_any_stage_ends_every_part_once(stage: str) -> None:
    world = CentralWorld("c0", "g0", config=CentralConfig(max_running_per_context_worker=1))
    if stage == "queued":
        world.submit(make_spec("other"))
    world.submit(make_spec("a"))
    if stage in {"offered", "deferred", "reserved", "active"}:
        world.compute_context("a")
    if stage in {"reserved", "active"}:
        world.reserve("a")
    if stage == "deferred":
        world.defer("a")
    if stage == "active":
        world.activate("a")
    world.cancel("a", "a", "unknown")
    for name in world.workers:
        world.do(name, lambda worker: None)
    if stage == "queued":
        world.cancel("other")
        world.do("c0", lambda worker: None)
    world.assert_idle()
    assert all(not worker.parts for worker in world.workers.values())
    assert world.counter("cancelled") == (2 if stage == "queued" else 1)
    assert world.notices == []


def test_a_cancelled_attempt_is_load_until_its_worker_says_that_it_is_gone() -> None:
    world = CentralWorld("c0", "g0")
    world.submit(make_spec("a"))
    world.cancel("a")
    assert world.load("c0") == (1, 10)
    world.do("c0", lambda worker: None)
    world.assert_idle()


def test_a_finish_that_crosses_the_cancel_frees_the_load_and_ends_nothing_twice() -> None:
    world = CentralWorld("m0")
    world.submit(make_spec("a"))
    attempt_id = world.attempt("m0", "a")
    worker = world.workers["m0"]
    worker.finish(attempt_id)
    world.cancel("a")
    worker.flush()
    world.receive(worker)
    world.assert_idle()
    assert world.counter("cancelled") == 1
    assert world.counter("completed") == 0


def test_a_context_that_ends_while_its_cancel_is_under_way_gives_its_lease_back() -> None:
    world = CentralWorld("c0", "g0")
    world.submit(make_spec("a"))
    attempt_id = world.attempt("c0", "a")
    worker = world.workers["c0"]
    worker.finish_context(attempt_id)
    world.cancel("a")
    worker.flush()
    world.receive(worker)
    world.assert_idle()
    assert world.commands("g0") == []
    assert [command for command in world.commands("c0") if isinstance(command, CancelAttempt)]


def test_a_door_cannot_cancel_the_request_of_another() -> None:
    world = CentralWorld("c0", "g0")
    world.submit(make_spec("a"))
    world.central.cancel(type(make_spec("a").door)("elsewhere"), [make_spec("a").uid], world.now_s)
    assert world.counter("cancelled") == 0


def test_leases_are_renewed_until_a_generation_worker_has_the_request() -> None:
    world = CentralWorld("c0", "g0")
    world.submit(make_spec("a"), make_spec("b"))
    world.compute_context("a")
    world.compute_context("b")
    world.defer("b")
    world.advance(0.5)
    renewals = [command for command in world.commands("c0") if isinstance(command, RenewLeases)]
    assert renewals == [RenewLeases((LeaseId(1), LeaseId(2)))]
    world.advance(0.1)
    assert len([c for c in world.commands("c0") if isinstance(c, RenewLeases)]) == 1
    world.reserve("a")
    world.advance(0.5)
    renewals = [command for command in world.commands("c0") if isinstance(command, RenewLeases)]
    assert renewals[1:] == [RenewLeases((LeaseId(2),))]
