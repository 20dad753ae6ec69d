"""Kind C: leaks, cancels and deaths."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from configs import CentralConfig, SchedulerConfig, TransferConfig
from configs.scheduling import DispatchPolicy
from kvtransfer.messages import TransferTicket
from manager import PageLease, Tier, WorkerName
from scheduler.errors import InvalidRequest
from scheduler.messages import ErrorKind, OfferGeneration
from scheduler.spec import RequestUid
from tests.fakes.attempts import make_handoff
from tests.fakes.handoff_door import DoorStream
from tests.fakes.handoff_worker import HandoffWorker, WorldShape
from tests.fakes.handoff_world import HandoffWorld
from tests.fakes.transfer_transport import GatedTransport
from tests.properties.handoff_explorer import Event, events_of, run, shape_of

PROMPT = range(100, 116)
GENERATION_FIRST = CentralConfig(dispatch=DispatchPolicy.GENERATION_FIRST)
DISPATCHES = [CentralConfig(), GENERATION_FIRST]
SLOW = SchedulerConfig(max_num_tokens=4, max_batch_size=4, chunk_unit_tokens=4)


def heartbeat(world: HandoffWorld) -> None:
    """One heartbeat's time, in which everybody turns."""
    world.turn()
    world.advance(0.5)
    world.turn()


# -- C1: the context side aborts or raises -------------------------------------------------------------------


@pytest.mark.parametrize("dispatch", DISPATCHES)
@pytest.mark.parametrize("turns", range(10))
def test_c01_an_abort_in_any_state_of_the_context_side_frees_the_generation_side_within_a_heartbeat(
    turns: int, dispatch: CentralConfig
) -> None:
    world = HandoffWorld(WorldShape(scheduler=SLOW, central=dispatch))
    stream = world.submit(PROMPT)
    for _ in range(turns):
        world.turn()
    world.abort(stream)
    heartbeat(world)
    assert world["generation-0"].leftovers() == []
    world.settle_down()


@pytest.mark.parametrize("dispatch", DISPATCHES)
@pytest.mark.parametrize("chunk", range(4))
def test_c01_a_context_that_raises_frees_the_generation_side_within_a_heartbeat(
    chunk: int, dispatch: CentralConfig
) -> None:
    world = HandoffWorld(WorldShape(scheduler=SLOW, central=dispatch))
    stream = world.submit(PROMPT)
    owner = world["context-0"]
    world.turns_until(lambda: owner.engine.num_steps == chunk)
    for _ in range(2):  # the step, and its one retry
        owner.engine.fails_in = 0
        world.turns_until(lambda: owner.engine.fails_in is None)
    heartbeat(world)
    assert stream.kind is ErrorKind.ENGINE
    assert world["generation-0"].leftovers() == []
    world.settle_down()


# -- C2, C3: death and refusal -------------------------------------------------------------------------------


@pytest.mark.parametrize("dispatch", DISPATCHES)
def test_c02_a_context_worker_killed_after_the_reservation_costs_no_page_and_no_token(
    dispatch: CentralConfig,
) -> None:
    world = HandoffWorld(WorldShape(is_gated=True, central=dispatch))
    reader = world["generation-0"]
    stream = world.submit(PROMPT, 5)
    world.turns_until(lambda: reader.agent.num_reservations == 1)
    attempt_id = reader.scheduler.running[0].attempt_id
    world.kill("context-0", num_sent=0)
    world.advance(2.0)
    for _ in range(4):
        world.turn()
    assert reader.scheduler.get(attempt_id) is None, "known by its owner's silence, before any deadline"
    assert reader.manager.stats().tiers[Tier.DEVICE].quarantined == 0
    assert attempt_id not in {request.attempt_id for request in reader.scheduler.running}
    world.supervise()
    world.run()
    assert stream.ends == ["finished"]
    world.settle_down()


def test_c02_without_a_central_scheduler_the_deadline_returns_the_pages() -> None:
    world = HandoffWorld(WorldShape(is_gated=True, transfer=TransferConfig(reservation_duration_s=6.0)))
    reader = world["generation-0"]
    assert isinstance(reader.transport, GatedTransport)
    reader.transport.may_finish = False
    world.submit(PROMPT, 5)
    world.turns_until(lambda: reader.agent.num_active == 1)
    world.kill("context-0", num_sent=0)
    world.now_s += 10.0
    for _ in range(4):
        reader.poll()
        reader.run_loop()
    assert reader.leftovers() == []


def test_c03_a_rejection_on_the_generation_side_returns_the_contexts_pages_in_the_same_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = HandoffWorld()
    owner, reader = world["context-0"], world["generation-0"]
    stream = world.submit(PROMPT)
    while not reader.loop._inbox:
        world.deliver_door()
        owner.run_loop()
        world.deliver_from("context-0")
    assert owner.agent.num_leases == 1

    def reject(*_: object) -> None:
        message = "rejected before admission"
        raise InvalidRequest(message)

    monkeypatch.setattr(reader.scheduler, "add_generation_offer", reject)
    reader.run_loop()
    world.deliver_from("generation-0")
    owner.run_loop()
    assert owner.leftovers() == []
    world.run()
    assert stream.kind is ErrorKind.NEVER_FITS
    assert "rejected before admission" in stream.ends[0]
    world.settle_down()


# -- C4, C5, C8: the client goes -----------------------------------------------------------------------------


def _is_at(world: HandoffWorld, stream: DoorStream, point: str) -> bool:
    owner, reader = world["context-0"], world["generation-0"]
    reached = {
        "queued": True,
        "prefilling": owner.engine.num_steps == 2,
        "sent but not received": reader.agent.num_active == 1,
        "queued on generation": reader.agent.has_outcomes or len(reader.scheduler._table.generations) > 0,
        "decoding": len(stream.accepted) == 4,
        "last token": len(stream.accepted) == stream.spec.stop.max_tokens - 1,
    }
    return reached[point]


@pytest.mark.parametrize("dispatch", DISPATCHES)
@pytest.mark.parametrize(
    "point", ["queued", "prefilling", "sent but not received", "queued on generation", "decoding", "last token"]
)
def test_c04_a_client_that_goes_leaves_both_pools_at_baseline_and_is_noticed_by_nobody(
    point: str, dispatch: CentralConfig
) -> None:
    world = HandoffWorld(WorldShape(scheduler=SLOW, central=dispatch))
    gone = world.submit(PROMPT, 8)
    world.turns_until(lambda: _is_at(world, gone, point))
    other = world.submit(range(300, 310), 6)
    world.abort(gone)
    world.run()
    assert (gone.ends, other.ends, other.num_resubmissions) == (["aborted"], ["finished"], 0)
    world.settle_down()


@pytest.mark.parametrize("turns", [0, 2, 4, 6, 8, 30])
def test_c05_an_abort_before_at_and_after_the_end_twice_and_of_nobody_is_one_end_and_no_error(turns: int) -> None:
    world = HandoffWorld()
    stream = world.submit(PROMPT, 3)
    for _ in range(turns):
        world.turn()
    for _ in range(2):
        world.abort(stream)
    world.central.cancel(stream.spec.door, [RequestUid("unheard of")], world.now_s)
    for _ in range(6):
        world.turn()
    world.abort(stream)
    world.settle_down()
    assert len(stream.ends) == 1
    counters = world.central.state(world.now_s)["counters"]
    assert counters["completed"] + counters["cancelled"] + counters["failed"] == counters["submitted"] == 1


def _received(world: HandoffWorld) -> bool:
    return world["generation-0"].agent.has_outcomes


def _suspended(world: HandoffWorld) -> bool:
    reader = world["generation-0"]
    return any(reader.manager.is_suspended(request.request_id) for request in reader.scheduler.running)


@pytest.mark.parametrize("moment", [_received, _suspended])
def test_c08_an_abort_before_the_first_step_or_on_the_host_tier_leaves_every_count_at_baseline(
    moment: Callable[[HandoffWorld], bool],
) -> None:
    world = HandoffWorld(WorldShape(pages=10, host_pages=20))
    streams = [world.submit(range(100 * n, 100 * n + 7), 20) for n in range(1, 5)]
    for _ in range(300):
        world.deliver_door()
        for name in ("context-0", "generation-0"):
            world[name].poll()
            if moment(world):
                break
            world[name].run_loop()
            world.deliver_from(name)
        if moment(world):
            break
        world.answer_all()
        world.advance(0.01)
    assert moment(world), "the moment came"
    reader = world["generation-0"]
    suspended = [r for r in reader.scheduler.running if reader.manager.is_suspended(r.request_id)]
    victims = [s for s in streams if s.is_open and any(r.spec.uid == s.spec.uid for r in suspended)] or streams[:1]
    for stream in victims:
        world.abort(stream)
    world.run()
    assert {stream.ends[0] for stream in streams} == {"aborted", "finished"}
    world.settle_down()


def test_c08_an_abort_while_an_offload_breaks_leaves_every_count_at_baseline() -> None:
    world = HandoffWorld(WorldShape(pages=10, host_pages=20))
    reader = world["generation-0"]
    streams = [world.submit(range(100 * n, 100 * n + 7), 20) for n in range(1, 5)]
    reader.copies.fails_stage = True
    for _ in range(120):
        world.turn()
        if not reader.is_alive:
            break
        world.advance(0.01)
    assert not reader.is_alive, "an offload was under way, and its worker ended"
    for stream in streams:
        world.abort(stream)
    world.supervise()
    world.settle_down()
    assert {stream.ends[0] for stream in streams} <= {"aborted", "finished"}


# -- C9 to C17 -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host_pages", [0, 20])
def test_c09_a_suspended_decode_never_asks_for_pages_that_were_consumed(host_pages: int) -> None:
    world = HandoffWorld(WorldShape(pages=10, host_pages=host_pages))
    streams = [world.submit(range(100 * n, 100 * n + 7), 20) for n in range(1, 5)]
    world.run()
    assert {stream.ends[0] for stream in streams} == {"finished"}
    reader, owner = world["generation-0"], world["context-0"]
    counters = reader.scheduler.counters()
    assert counters["suspensions" if host_pages else "recomputes"] > 0
    assert reader.agent.counters()["receives_started"] == len(streams)
    assert owner.agent.counters()["leases_granted"] == owner.agent.counters()["leases_settled"] == len(streams)
    world.settle_down()


@pytest.mark.parametrize("seed", range(0, 40, 2))
def test_c11_load_counters_are_what_is_in_flight_never_negative_and_zero_when_idle(seed: int) -> None:
    worlds: list[HandoffWorld] = []

    def watch(event: Event) -> None:
        for record in worlds[0].central._books.ledger:
            # A lease waits for its reader: it is no work of its owner any more.
            work = [holding for holding in record.holdings.values() if holding.kind.value != "lease"]
            assert record.num_attempts == len(work) >= 0, event
            assert record.num_tokens == sum(holding.num_tokens for holding in work) >= 0, event

    worlds.append(HandoffWorld(shape_of(seed)))
    run(shape_of(seed), events_of(seed), watch, world=worlds[0])
    for worker in worlds[0].central.state(worlds[0].now_s)["workers"]:
        assert worker["ledger"] == {"attempts": 0, "tokens": 0, "leases": 0}


def test_c12_the_death_of_one_context_worker_leaves_the_others_traffic_alone() -> None:
    world = HandoffWorld(WorldShape(context_workers=2, pages=32, scheduler=SLOW))
    streams = [world.submit(range(100 * n, 100 * n + 12), 4) for n in range(1, 7)]
    world.deliver_door()
    for name in ("context-0", "context-1"):
        world[name].run_loop()
    mine = {r.spec.uid for r in (*world["context-1"].scheduler.running, *world["context-1"].scheduler.waiting)}
    unaffected = [stream for stream in streams if stream.spec.uid in mine]
    attempts = {uid: world.central._books.requests[uid].attempt_id for uid in mine}
    assert 0 < len(unaffected) < len(streams)
    world.kill("context-0", num_sent=0)
    world.advance(2.0)
    assert {uid: world.central._books.requests[uid].attempt_id for uid in mine} == attempts
    world.run()  # nobody restarts it
    assert {stream.ends[0] for stream in streams} == {"finished"}
    assert [stream.num_resubmissions for stream in unaffected] == [0] * len(unaffected)
    world.supervise()
    world.settle_down()


def test_c13_a_dead_engine_is_replaced_and_the_503_ends() -> None:
    world = HandoffWorld()
    world.kill("generation-0", num_sent=0)
    world.advance(2.0)
    assert world.central.health()[0] is False
    assert world.central.lost_workers() == {WorkerName("generation-0"): world["generation-0"].identity.epoch}
    waiting = world.submit(PROMPT)
    world.deliver_door()
    world.supervise()
    assert world.central.health() == (True, "")
    world.run()
    assert waiting.ends == ["finished"], "what came while it was away was kept for it"
    world.settle_down()


def _without_last_page(lease: PageLease) -> PageLease:
    return replace(lease, pages=lease.pages[:-1])


@pytest.mark.parametrize("fault", ["partial", "other layout", "other length", "not a ticket"])
def test_c17_a_ticket_that_is_missing_or_partial_ends_in_another_try_and_never_in_a_hang(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = HandoffWorld()
    owner, reader = world["context-0"], world["generation-0"]
    made: list[TransferTicket] = []
    make_ticket = owner.agent.make_ticket

    def broken(lease: PageLease) -> TransferTicket:
        made.append(make_ticket(lease))
        if len(made) > 1:
            return made[-1]
        if fault == "other layout":
            return replace(made[0], layout=replace(made[0].layout, tokens_per_block=8))
        if fault == "other length":  # its pages cover the prompt; what it says of them does not
            return replace(made[0], lease=replace(lease, num_tokens=lease.num_tokens - 1))
        return replace(made[0], lease=_without_last_page(lease))

    if fault == "not a ticket":
        _replace_first_offer(reader, monkeypatch)
    else:
        monkeypatch.setattr(owner.agent, "make_ticket", broken)
    stream = world.submit(PROMPT, 4)
    world.run(20.0)
    assert (stream.ends, stream.num_resubmissions) == (["finished"], 1)
    world.settle_down()


def _replace_first_offer(reader: HandoffWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    offer = reader.loop._generation_side.offer
    seen: list[OfferGeneration] = []

    def with_a_stranger(command: OfferGeneration, now_s: float) -> None:
        seen.append(command)
        offer(replace(command, handoff=make_handoff()) if len(seen) == 1 else command, now_s)

    monkeypatch.setattr(reader.loop._generation_side, "offer", with_a_stranger)
