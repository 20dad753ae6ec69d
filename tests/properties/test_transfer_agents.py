"""Two agents under lost, late and repeated messages, skewed clocks, cancels, broken transports and deaths."""

from collections.abc import Sequence
from typing import TypeVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvtransfer.messages import ReceiveResult
from manager import RequestId
from tests.fakes.transfer_transport import GatedTransport
from tests.fakes.transfer_values import CONFIG
from tests.fakes.transfer_world import NUM_SLOTS, TransferWorld

T = TypeVar("T")

SHORT_S = st.sampled_from([0.0, 0.0, 0.1, 0.5])
LONG_S = st.sampled_from([2.0, 4.0, 9.4, 9.5, 10.0, 25.0])
RECENT = st.sampled_from([0, 0, 0, 1, 2, 5])
"""How far back a verb reaches: mostly to the newest, sometimes to what everyone has forgotten."""


def recent(items: Sequence[T], back: int) -> T:
    """The newest but `back`."""
    return items[max(len(items) - 1 - back, 0)]


class TransferMachine(RuleBasedStateMachine):
    """Every verb of `TransferWorld` in any order; the world checks the bytes.

    Weighted towards progress: with as many disasters as deliveries nothing would ever be verified, and a
    wrong trust could not be seen.
    """

    world: TransferWorld

    @initialize(is_gated=st.booleans(), may_finish=st.booleans())
    def begin(self, is_gated: bool, may_finish: bool) -> None:
        self.world = TransferWorld(is_gated=is_gated)
        if isinstance(self.world.transport, GatedTransport):
            self.world.transport.may_finish = self.world.transport.may_stop = may_finish

    # -- the owner -------------------------------------------------------------------------------------

    @rule(num_pages=st.integers(1, 3), num_skipped=st.integers(0, 1))
    def give_a_lease_and_receive_it(self, num_pages: int, num_skipped: int) -> None:
        given = self.world.give(num_pages)
        if given is not None:
            self.world.receive(given, num_skipped)

    @precondition(lambda self: self.world.given)
    @rule(back=RECENT, delay_s=SHORT_S | LONG_S)
    def renew_with_a_command_that_took_its_time(self, back: int, delay_s: float) -> None:
        given = recent(self.world.given, back)
        self.world.owner.renew([given.ticket.lease_id], self.world.owner_s - delay_s)

    @precondition(lambda self: self.world.given)
    @rule(back=RECENT)
    def drop_a_lease(self, back: int) -> None:
        self.world.drop(recent(self.world.given, back))

    @precondition(lambda self: len(self.world.given) > 2)
    @rule(is_really=st.integers(0, 2).map(lambda draw: draw == 2))
    def restart_the_owner(self, is_really: bool) -> None:
        if is_really:
            self.world.start_owner()

    @rule(seconds=SHORT_S)
    def let_the_owner_live(self, seconds: float) -> None:
        self.world.owner_s += seconds
        self.world.owner.poll(self.world.owner_s)
        self.world.drain_owner()

    @rule(seconds=LONG_S)
    def pause_the_reader(self, seconds: float) -> None:
        self.let_the_owner_live(seconds)

    # -- the network -----------------------------------------------------------------------------------

    @precondition(lambda self: self.world.messages)
    @rule(back=RECENT)
    def deliver_a_question_and_its_answer(self, back: int) -> None:
        message = recent(self.world.messages, back)
        self.world.deliver_to_owner(message)
        message.is_answer_here = True

    @precondition(lambda self: self.world.messages)
    @rule(back=RECENT, delay_s=SHORT_S)
    def deliver_a_question_and_hold_the_answer(self, back: int, delay_s: float) -> None:
        self.world.deliver_to_owner(recent(self.world.messages, back), delay_s)

    @precondition(lambda self: self.world.messages)
    @rule(back=RECENT, is_really=st.booleans())
    def lose_an_answer(self, back: int, is_really: bool) -> None:
        if is_really:
            recent(self.world.messages, back).is_lost = True

    @rule()
    def let_everything_work_for_a_while(self) -> None:
        for _ in range(2):
            self.let_the_reader_live(0.0, 4)
            for message in self.world.messages:
                self.world.deliver_to_owner(message)
                message.is_answer_here = True
        self.world.drain_owner()
        self.world.drain_reader()

    # -- the reader ------------------------------------------------------------------------------------

    @precondition(lambda self: self.world.given)
    @rule(back=RECENT, num_skipped=st.integers(0, 1))
    def receive_with_a_ticket_that_was_used_or_took_its_time(self, back: int, num_skipped: int) -> None:
        self.world.receive(recent(self.world.given, back), num_skipped)

    @precondition(lambda self: self.world.receives)
    @rule(back=RECENT)
    def cancel_a_receive(self, back: int) -> None:
        self.world.reader.cancel_receive(recent(list(self.world.receives), back))

    @rule(is_late=st.booleans())
    def end_everything_and_drain_it(self, is_late: bool) -> None:
        """Shutdown of every request, or a pause past every deadline: nothing may be written afterwards."""
        if is_late:
            self.world.reader_s += CONFIG.lease_duration_s
        else:
            for request_id, receive in self.world.receives.items():
                if receive.result is None:
                    self.world.reader.cancel_receive(request_id)
        self.let_the_reader_live(0.0, 1)
        self.world.drain_reader()

    @rule(seconds=SHORT_S, times=st.integers(1, 4))
    def let_the_reader_live(self, seconds: float, times: int) -> None:
        self.world.reader_s += seconds
        for _ in range(times):
            self.world.reader.poll(self.world.reader_s)

    @rule()
    def let_the_reader_live_and_drain_it(self) -> None:
        self.let_the_reader_live(0.0, 4)
        self.world.drain_reader()

    @rule(seconds=LONG_S)
    def pause_the_owner(self, seconds: float) -> None:
        self.let_the_reader_live(seconds, 1)

    @precondition(lambda self: isinstance(self.world.transport, GatedTransport))
    @rule(
        may_finish=st.booleans(),
        may_stop=st.booleans(),
        raise_in=st.sampled_from([(), (), ("read",), ("poll",), ("cancel",), ("poll", "cancel")]),
    )
    def change_the_wire(self, may_finish: bool, may_stop: bool, raise_in: tuple[str, ...]) -> None:
        assert isinstance(self.world.transport, GatedTransport)
        self.world.transport.may_finish, self.world.transport.may_stop = may_finish, may_stop
        self.world.transport.raise_in = set(raise_in)

    @precondition(lambda self: isinstance(self.world.transport, GatedTransport))
    @rule()
    def let_the_wire_write_by_itself(self) -> None:
        assert isinstance(self.world.transport, GatedTransport)
        self.world.transport.move()

    # -- truth -----------------------------------------------------------------------------------------

    @invariant()
    def nothing_is_lost_or_written_by_mistake(self) -> None:
        self.world.check()

    def teardown(self) -> None:
        """Once the wire works and time has passed, everything ends and every table is at its baseline."""
        if not hasattr(self, "world"):
            return
        world = self.world
        if isinstance(world.transport, GatedTransport):
            world.transport.may_finish = world.transport.may_stop = True
            world.transport.raise_in = set()
        world.reader_s += 2 * CONFIG.lease_duration_s
        world.owner_s += 2 * CONFIG.lease_duration_s
        for _ in range(3 + 2 * NUM_SLOTS):
            world.reader.poll(world.reader_s)
        world.owner.poll(world.owner_s)
        world.drain_owner()
        world.drain_reader()
        world.check()
        assert world.reader.num_active == 0
        assert all(receive.result is not None for receive in world.receives.values())
        assert world.owner.num_leases == 0
        assert all(len(given.ends) == 1 for given in world.given)
        assert world.reader.counters()["receives_started"] == len(world.receives)
        assert world.reader.poll(world.reader_s) == CONFIG.heartbeat_s


TestTransferMachine = TransferMachine.TestCase
TestTransferMachine.settings = settings(
    max_examples=150, stateful_step_count=40, derandomize=True, deadline=None, database=None
)


def test_the_machines_world_can_end_verified() -> None:
    """A machine whose every receive fails would prove nothing."""
    world = TransferWorld(is_gated=False)
    given = world.give(3)
    assert given is not None
    assert world.receive(given, 1)
    world.reader.poll(world.reader_s)
    world.reader.poll(world.reader_s)
    [message] = world.messages
    world.deliver_to_owner(message)
    message.is_answer_here = True
    world.reader.poll(world.reader_s)
    world.drain_owner()
    world.drain_reader()
    world.check()
    assert world.receives[RequestId("attempt-0")].result is ReceiveResult.VERIFIED
    assert given.ends == ["settled"]
