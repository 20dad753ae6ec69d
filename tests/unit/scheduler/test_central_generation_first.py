"""Generation-first dispatch (C2): pages on the generation side first, then the context."""

from configs import CentralConfig, DispatchPolicy
from scheduler.messages import DeliverHandoff, OfferGeneration, RunContext
from scheduler.tickets import DeliverPart
from tests.fakes.central_workers import ModelWorker
from tests.fakes.central_world import CentralWorld, make_spec


def _world(*workers: str) -> CentralWorld:
    config = CentralConfig(dispatch=DispatchPolicy.GENERATION_FIRST, max_running_per_context_worker=1)
    return CentralWorld(*(workers or ("c0", "g0")), config=config)


def _read_all(world: CentralWorld) -> None:
    for name in world.workers:
        world.do(name, lambda worker: None)


def test_the_offer_comes_first_then_the_context_then_the_handoff() -> None:
    world = _world()
    world.submit(make_spec("a"))
    offer = world.commands("g0")[0]
    assert isinstance(offer, OfferGeneration)
    assert offer.handoff is None
    assert world.commands("c0") == []
    world.reserve("a")
    assert [type(command) for command in world.commands("c0")] == [RunContext]
    world.compute_context("a")
    assert [type(command) for command in world.commands("g0")] == [OfferGeneration, DeliverHandoff]
    world.activate("a")
    world.finish("a")
    world.assert_idle()


def _parts(world: CentralWorld, worker: str) -> list[DeliverPart]:
    return [command for command in world.commands(worker) if isinstance(command, DeliverPart)]


def test_parts_of_a_context_go_to_the_reader_that_waits_for_it_and_change_nothing_else() -> None:
    world = _world()
    world.submit(make_spec("a"))
    world.reserve("a")
    (run,) = world.commands("c0")
    assert isinstance(run, RunContext)
    assert run.has_reader
    world.do_each("c0", ModelWorker.offer_part, "a")
    world.do_each("c0", ModelWorker.offer_part, "a")
    assert [part.attempt_id for part in _parts(world, "g0")] == [run.attempt_id] * 2
    world.compute_context("a")
    world.activate("a")
    world.finish("a")
    world.assert_idle()


def test_a_part_of_a_cancelled_request_goes_nowhere() -> None:
    world = _world()
    world.submit(make_spec("a"))
    world.reserve("a")
    attempt_id = world.attempt("c0", "a")
    world.workers["c0"].read_commands()
    world.workers["c0"].offer_part(attempt_id)
    world.cancel("a")
    world.workers["c0"].flush()
    world.receive(world.workers["c0"])
    assert _parts(world, "g0") == []
    _read_all(world)
    world.assert_idle()


def test_a_deferred_first_offer_waits_at_its_place_and_starts_no_context() -> None:
    world = _world()
    world.submit(make_spec("a"), make_spec("b"))
    world.do_each("g0", ModelWorker.defer, "a", "b")
    world.report_room("g0")
    offers = [c.spec.uid for c in world.commands("g0") if isinstance(c, OfferGeneration)]
    assert offers == ["a", "b", "a"]
    assert world.commands("c0") == []


def test_a_first_token_that_ends_the_request_releases_the_reservation() -> None:
    world = _world()
    world.submit(make_spec("a"))
    world.reserve("a")
    attempt_id = world.attempt("c0", "a")
    world.do("c0", lambda worker: worker.finish_by_first_token(attempt_id))
    _read_all(world)
    world.assert_idle()
    assert not world.workers["g0"].parts
    assert world.counter("completed") == 1


def test_reservations_wait_for_a_context_worker_in_order_of_arrival() -> None:
    world = _world()
    world.submit(make_spec("a"), make_spec("b"), make_spec("c"))
    world.do_each("g0", ModelWorker.reserve, "a", "c", "b")
    world.compute_context("a")
    assert world.attempt("c0", "b") in world.workers["c0"].parts


def test_either_side_lost_before_the_first_token_is_retried_here_and_frees_the_other() -> None:
    for lost in ("c0", "g0"):
        world = _world("c0", "c1", "g0", "g1")
        world.submit(make_spec("a"))
        world.reserve("a")
        first = world.attempt("c0", "a")
        world.lose(lost)
        _read_all(world)
        assert world.notices == []
        assert world.counter("retries") == 1
        held = {attempt_id for worker in world.workers.values() for attempt_id in worker.parts}
        assert first not in held
        assert len(held) == 1


def test_queued_requests_turn_to_a_mixed_worker_when_that_is_what_joins() -> None:
    world = _world("m0")
    world.lose("m0")
    world.submit(make_spec("a"))
    world.start("m0")
    world.finish("a", "m0")
    world.assert_idle()
    empty = CentralWorld(config=CentralConfig(dispatch=DispatchPolicy.GENERATION_FIRST))
    empty.submit(make_spec("a", accepted=1))
    empty.start("m0")
    empty.finish("a", "m0")
    empty.assert_idle()
