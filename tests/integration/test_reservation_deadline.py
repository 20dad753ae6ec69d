"""A reservation ends by activation, cancel or deadline, whatever the other side does (M7, I5)."""

from configs import CentralConfig, TransferConfig
from configs.scheduling import DispatchPolicy
from manager import WorkerName
from tests.fakes.handoff_worker import PAGE_BYTES, WorldShape
from tests.fakes.handoff_world import HandoffWorld
from tests.fakes.transfer_transport import GatedTransport

_GENERATION_FIRST = CentralConfig(dispatch=DispatchPolicy.GENERATION_FIRST, request_deadline_s=60.0)
_SHORT = TransferConfig(lease_duration_s=4.0, reservation_duration_s=6.0)
PROMPT = range(100, 110)


def _counters(world: HandoffWorld, name: str) -> dict[str, int]:
    return dict(world[name].loop._make_snapshot().counters)


def test_a_reservation_whose_context_never_comes_is_swept_without_a_step() -> None:
    world = HandoffWorld(WorldShape(central=_GENERATION_FIRST, transfer=_SHORT))
    stream = world.submit(PROMPT)
    reader = world["generation-0"]
    world.deliver_door()
    reader.run_loop()
    assert reader.agent.num_reservations == 1
    # Nobody renews: the central scheduler is gone.
    world.now_s += 6.0
    num_steps = reader.engine.num_steps
    reader.poll()
    assert reader.run_loop()
    assert reader.engine.num_steps == num_steps
    assert reader.leftovers() == []
    assert _counters(world, "generation-0")["reservations_expired"] == 1
    world.run()
    assert stream.ends == ["finished"]
    world.settle_down()


def test_a_reservation_is_renewed_while_its_context_waits_for_its_turn() -> None:
    world = HandoffWorld(WorldShape(central=_GENERATION_FIRST, transfer=_SHORT))
    stream = world.submit(PROMPT)
    world.deliver_door()
    reader = world["generation-0"]
    reader.run_loop()
    for _ in range(4):
        world.advance(1.0)
        reader.run_loop()
        world[WorkerName("context-0")].loop._take_commands()
    world["context-0"].loop._history.iteration += 1  # it is slow, not hung
    for _ in range(4):
        world.advance(1.0)
        reader.run_loop()
    assert reader.agent.num_reservations == 1
    counters = _counters(world, "generation-0")
    assert counters["reservations_expired"] == 0
    assert counters["reservations_renewed"] > 4
    world.run()
    assert stream.ends == ["finished"]


def test_a_read_that_never_ends_fails_its_attempt_at_the_deadline_and_keeps_its_pages_quarantined() -> None:
    world = HandoffWorld(WorldShape(is_gated=True, transfer=_SHORT, central=CentralConfig(request_deadline_s=60.0)))
    stream = world.submit(PROMPT)
    reader = world["generation-0"]
    assert isinstance(reader.transport, GatedTransport)
    reader.transport.may_finish = reader.transport.may_stop = False
    world.turns_until(lambda: reader.agent.num_active == 1)
    attempt_id = reader.scheduler.running[0].attempt_id
    world.advance(5.5)  # the lease's end: it is told to stop, and does not say that it has
    assert reader.scheduler.get(attempt_id) is not None
    world.advance(1.0)
    reader.run_loop()
    assert reader.scheduler.get(attempt_id) is None
    (pages,) = reader.manager.stats().tiers.values()
    assert pages.quarantined == 3
    assert pages.reserved == 0
    reader.transport.may_finish = reader.transport.may_stop = True
    world.run()
    assert stream.ends == ["finished"]
    world.settle_down()


def test_an_expiry_that_comes_after_the_activation_is_counted_and_ignored() -> None:
    world = HandoffWorld(WorldShape(transfer=TransferConfig(reservation_duration_s=6.0)))
    stream = world.submit(PROMPT, max_tokens=6)
    reader = world["generation-0"]
    world.holds_answers = True
    world.turns_until(lambda: bool(world.questions))
    world.answer_all()
    reader.poll()  # verified, and the loop is slow to hear of it
    world.now_s += 6.0
    reader.poll()
    reader.run_loop()
    assert _counters(world, "generation-0")["reservations_expired"] == 1
    assert _counters(world, "generation-0")["late_signals"] == 1
    world.holds_answers = False
    world.run()
    assert stream.ends == ["finished"]
    assert stream.num_resubmissions == 0
    world.settle_down()


def test_an_answer_that_comes_after_the_expiry_activates_nothing() -> None:
    world = HandoffWorld(WorldShape(transfer=TransferConfig(reservation_duration_s=6.0)))
    stream = world.submit(PROMPT, max_tokens=6)
    reader = world["generation-0"]
    world.holds_answers = True
    world.turns_until(lambda: bool(world.questions))
    world.answer_all()
    world.now_s += 6.0
    reader.poll()  # sweeps first, then finds the answer: the loop hears both at once
    assert len(reader.agent._outcomes) == 2
    reader.run_loop()
    assert reader.leftovers() == []
    world.holds_answers = False
    world.run()
    assert stream.ends == ["finished"]
    assert stream.num_resubmissions == 1
    world.settle_down()


def test_a_place_that_is_reserved_before_its_context_exists_is_in_the_transfer_window() -> None:
    world = HandoffWorld(WorldShape(central=_GENERATION_FIRST, window_pages=4))
    streams = [world.submit(range(100 * n, 100 * n + 10)) for n in range(2)]
    world.deliver_door()
    reader = world["generation-0"]
    reader.run_loop()
    assert reader.window.taken_bytes == 3 * PAGE_BYTES
    assert reader.agent.num_reservations == 1, "the second would make six pages of a window of four"
    assert reader.scheduler.counters()["deferrals"] == 1
    world.run()
    assert [stream.ends for stream in streams] == [["finished"]] * 2
    world.settle_down()
