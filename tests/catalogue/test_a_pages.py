"""Kind A: the life of pages, and one request's bytes reaching another."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from configs import SchedulerConfig, TransferConfig
from kvtransfer.messages import MemoryDescription, PageCopy, ReadStatus
from kvtransfer.transports.base import ReadId
from kvtransfer.transports.inprocess import InProcessRegistry, InProcessTransport
from manager import PageCounts, Tier
from scheduler.messages import ErrorKind
from tests.fakes.handoff_worker import PAGE_BYTES, HandoffWorker, WorldShape
from tests.fakes.handoff_world import HandoffWorld
from tests.fakes.transfer_transport import GatedTransport

PROMPT = range(100, 116)  # four blocks
GATED = WorldShape(is_gated=True)
MIXED = WorldShape(
    context_workers=0,
    generation_workers=0,
    mixed_workers=1,
    scheduler=SchedulerConfig(max_num_tokens=24, max_batch_size=4, chunk_unit_tokens=4, defer_duplicate_prefixes=False),
)


def stall(worker: HandoffWorker) -> GatedTransport:
    """Nothing moves on its wire, and it does not say that it stopped."""
    assert isinstance(worker.transport, GatedTransport)
    worker.transport.may_finish = worker.transport.may_stop = False
    return worker.transport


def release(transport: GatedTransport) -> None:
    """The wire works again."""
    transport.may_finish = transport.may_stop = True


def device(worker: HandoffWorker) -> PageCounts:
    """Its device pages."""
    return worker.manager.stats().tiers[Tier.DEVICE]


def test_a01_pages_under_a_live_lease_outlive_a_pool_full_of_other_prompts() -> None:
    world = HandoffWorld(replace(GATED, pages=9))
    owner, reader = world["context-0"], world["generation-0"]
    transport = stall(reader)
    first = world.submit(PROMPT)
    world.turns_until(lambda: bool(transport.active))
    held = owner._leased_bytes()
    others = [world.submit(range(1000 * n, 1000 * n + 16), 2) for n in range(1, 5)]
    for _ in range(12):
        world.turn()
        world.check()
    assert owner.agent.num_leases > 1, "others were computed beside the leased pages"
    assert {lease: content for lease, content in owner._leased_bytes().items() if lease in held} == held
    # The send breaks: known on the generation side within one poll, and the pages go back.
    transport.fail_next = "the sender raised"
    reader.poll()
    assert [outcome.message for outcome in reader.agent._outcomes] == ["the sender raised"]  # type: ignore[union-attr]
    release(transport)
    world.run()
    assert {stream.ends[0] for stream in (first, *others)} == {"finished"}
    world.settle_down()


@pytest.mark.parametrize("is_settled", [True, False])
def test_a02_a_finished_contexts_pages_stay_until_the_lease_ends_and_then_nobody_holds_them(
    is_settled: bool,
) -> None:
    world = HandoffWorld(GATED)
    owner, reader = world["context-0"], world["generation-0"]
    transport = stall(reader)
    stream = world.submit(PROMPT)
    world.turns_until(lambda: bool(transport.active))
    owner.run_loop()
    assert device(owner).leased == 4
    if is_settled:
        release(transport)
        world.turns_until(lambda: owner.agent.num_leases == 0)
    else:
        world.now_s += 10.0  # nobody renews
        owner.poll()
    assert device(owner).leased == 4, "the agent knows; the pages are the loop's"
    owner.run_loop()
    assert device(owner).leased == device(owner).in_use == 0
    release(transport)
    world.run()
    assert stream.ends == ["finished"]
    world.settle_down()


@pytest.mark.parametrize("side", ["owner", "reader"])
def test_a03_an_abort_in_a_slow_transfer_hands_no_page_on_too_early(side: str) -> None:
    world = HandoffWorld(replace(GATED, pages=8))
    owner, reader = world["context-0"], world["generation-0"]
    transport = stall(reader)
    first = world.submit(PROMPT, 6)
    world.turns_until(lambda: bool(transport.active))
    reader.move_bytes()
    world.abort(first)
    world.deliver_door()
    (owner if side == "owner" else reader).run_loop()  # the other side hears of it later
    second = world.submit(range(200, 216), 6)
    for _ in range(10):
        world.deliver_door()
        owner.poll()
        owner.run_loop()
        world.deliver_from("context-0")
        reader.move_bytes()  # the wire still writes what the first request's read asked for
        reader.poll()
        reader.run_loop()
        world.deliver_from("generation-0")
        world.check()
    release(transport)
    world.run()
    assert (first.ends, second.ends) == (["aborted"], ["finished"])
    world.settle_down()


def test_a05_pages_that_a_silent_sender_may_still_fill_are_quarantined_until_the_read_ends() -> None:
    world = HandoffWorld(GATED)
    reader = world["generation-0"]
    transport = stall(reader)
    stream = world.submit(PROMPT)
    world.turns_until(lambda: bool(transport.active))
    request_id = reader.scheduler.running[0].request_id
    world.abort(stream)
    world.deliver_door()
    for _ in range(8):
        reader.run_loop()
        world.advance(2.0)  # past every deadline: only the wire's word frees them
        assert device(reader).quarantined == 4
    transport.may_finish, transport.may_stop = True, True
    reader.move_bytes()
    reader.poll()
    reader.run_loop()
    assert device(reader).quarantined == 0
    late = reader.scheduler.counters()["late_signals"]
    assert reader.scheduler.on_received(request_id, 1, reader.now_s()) is None
    assert reader.scheduler.counters()["late_signals"] == late + 1
    world.settle_down()


def test_a07_nobody_computes_on_a_shared_page_whose_load_failed() -> None:
    world = HandoffWorld(replace(MIXED, pages=10, host_pages=12))
    worker = world["mixed-0"]
    world.submit(PROMPT, 2)
    world.run()
    fillers = [world.submit(range(1000 * n, 1000 * n + 24), 8) for n in range(1, 4)]
    world.run()
    assert worker.copies.num_staged > 0, "the shared blocks went to the host tier"
    filled = worker.copies.num_filled
    worker.copies.fails_fill = True
    sharers = [world.submit([*PROMPT, tail], 4) for tail in (1, 2)]
    world.run()
    assert not worker.copies.fails_fill, "a load was made to fail"
    assert worker.scheduler.counters()["lost_pages"] >= 1
    assert worker.copies.num_filled >= filled
    # The engine reads every position of every request in every step, and has found each as it must be.
    assert {stream.ends[0] for stream in (*fillers, *sharers)} == {"finished"}
    world.settle_down()


@pytest.mark.parametrize("fault", ["none", "stage"])
def test_a08_what_comes_back_from_a_lower_tier_is_what_went_there(fault: str) -> None:
    world = HandoffWorld(replace(MIXED, pages=10, host_pages=40))
    worker = world["mixed-0"]
    worker.copies.fails_stage = fault == "stage"
    streams = [world.submit(range(1000 * n, 1000 * n + 8), 14) for n in range(1, 5)]
    for _ in range(40):
        world.turn()
        world.supervise()  # a tier that cannot be written ends the process
    world.run()
    assert {stream.ends[0] for stream in streams} == {"finished"}
    counters = world["mixed-0"].scheduler.counters()
    assert counters["suspensions"] > 0
    assert counters["resumes"] == counters["suspensions"]
    assert len(world.past_lives) == (fault == "stage")
    world.settle_down()


def test_a11_a_transfer_is_complete_when_every_part_is_here_and_not_by_a_count_of_signals() -> None:
    world = HandoffWorld(GATED)
    owner, reader = world["context-0"], world["generation-0"]
    transport = stall(reader)
    stream = world.submit(PROMPT)
    world.turns_until(lambda: bool(transport.active))
    for _ in range(3):
        reader.move_bytes()
    assert transport.bytes_moved == 3 * PAGE_BYTES
    for _ in range(10):
        reader.poll()
        world.answer_all()
        reader.run_loop()
    assert owner.agent.num_leases == 1
    assert device(reader).reserved == 5, "three of four parts, reported again and again, activate nothing"
    reader.move_bytes()
    reader.poll()
    world.answer_all()
    reader.poll()
    reader.run_loop()
    assert device(reader).reserved == 0
    world.run()
    assert stream.ends == ["finished"]


def test_a12_an_over_long_prompt_is_refused_and_nothing_is_admitted_anywhere() -> None:
    world = HandoffWorld()
    before = {name: worker.manager.snapshot() for name, worker in world.workers.items()}
    stream = world.submit(range(1000), 4)
    world.run()
    assert stream.kind is ErrorKind.NEVER_FITS
    assert "needs 1000 tokens; the largest context worker takes 64" in stream.ends[0]
    for name, worker in world.workers.items():
        assert not worker.run_loop()
        assert worker.manager.snapshot() == before[name]
    world.settle_down()


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_a13_a_prefix_from_a_lower_tier_is_promoted_before_it_is_sent(tier: str) -> None:
    # Host copies go on to the disk when the host tier is full as well.
    lower = {"host_pages": 12} if tier == "host" else {"host_pages": 2, "disk_pages": 12}
    world = HandoffWorld(replace(WorldShape(pages=10), **lower))  # type: ignore[arg-type]
    owner = world["context-0"]
    world.submit(PROMPT, 2)
    world.run()
    for n in range(1, 4):
        world.submit(range(1000 * n, 1000 * n + 24), 2)
        world.run()
        world.settle_down()
    filled, hits = owner.copies.num_filled, owner.manager.stats().prefix_hit_tokens
    reader_hits = world["generation-0"].agent.counters()["bytes_received"]
    stream = world.submit([*PROMPT, *range(500, 504)], 5)
    world.run()
    assert owner.manager.stats().prefix_hit_tokens > hits
    assert owner.copies.num_filled > filled, "the prefix came from below"
    assert world["generation-0"].agent.counters()["bytes_received"] > reader_hits
    assert stream.ends == ["finished"], "and its decode reads every position"
    world.settle_down()


class _IdleTransport(InProcessTransport):
    """A wrapped transport whose read was forgotten: it says DONE and moves nothing."""

    def read(self, source: MemoryDescription, copies: Sequence[PageCopy]) -> ReadId:
        """Start nothing."""
        return ReadId(1)

    def poll(self, read_id: ReadId) -> ReadStatus:
        """Say that it is done."""
        return ReadStatus.DONE


def test_a14_a_transport_that_moves_nothing_shows_in_the_bytes_that_it_moved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = HandoffWorld(WorldShape(transfer=TransferConfig()))
    reader = world["generation-0"]
    honest = world.submit(PROMPT)
    world.run()
    counters = reader.agent.counters()
    assert honest.ends == ["finished"]
    assert counters["bytes_received"] == counters["bytes_verified"] == 4 * PAGE_BYTES
    idle = _IdleTransport(InProcessRegistry(), "idle")
    memory: npt.NDArray[np.uint8] = np.zeros(64, np.uint8)
    idle.register(memory)
    monkeypatch.setattr(reader.agent, "_transport", idle)
    world.submit(range(300, 316))
    world.turns_until(lambda: reader.agent.counters()["receives_verified"] == 2)
    counters = reader.agent.counters()
    assert counters["bytes_verified"] == 8 * PAGE_BYTES
    assert counters["bytes_received"] == 0, "planned bytes do not count; moved ones do"
