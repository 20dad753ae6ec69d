"""The door of a simulation finds every wrong token."""

from dataclasses import dataclass, field

import pytest

from manager import Epoch, WorkerName
from scheduler.messages import DoorNotice, ErrorKind, TokenBatch, TokenEvent
from scheduler.spec import AttemptId, FinishReason, RequestSpec, RequestUid
from serving.simulation.arrivals import Arrival
from serving.simulation.door import DOOR, SimulatedDoor, StreamError
from serving.simulation.engine import drawn_token
from serving.simulation.event_queue import EventQueue

UID = RequestUid("request-0")


@dataclass
class _World:
    events: EventQueue = field(default_factory=EventQueue)
    submitted: list[RequestSpec] = field(default_factory=list)
    cancelled: list[RequestUid] = field(default_factory=list)

    def door(self, output_length: int = 2) -> SimulatedDoor:
        door = SimulatedDoor(self.events, self.submitted.append, self.cancelled.append)
        door.expect([Arrival(1.0, (1, 2, 3), output_length)])
        self.events.run_until(1.0)
        return door


def _tokens(position: int, *, is_last: bool = False, token: int | None = None) -> TokenBatch:
    token_id = drawn_token(0, position) if token is None else token
    event = TokenEvent(UID, AttemptId("1.1"), position, token_id, FinishReason.LENGTH if is_last else None)
    return TokenBatch(WorkerName("w"), Epoch(1), DOOR, (event,))


def test_a_stream_ends_with_its_last_token_and_drops_repeats() -> None:
    world = _World()
    door = world.door()
    door.on_tokens(_tokens(0))
    door.on_tokens(_tokens(0))
    door.on_tokens(_tokens(1, is_last=True))
    assert (door.num_open, door.num_repeats) == (0, 1)
    assert door.streams[UID].accepted == [drawn_token(0, 0), drawn_token(0, 1)]


@pytest.mark.parametrize(
    "batch", [_tokens(1), _tokens(0, token=5), _tokens(0, is_last=True)], ids=["gap", "invented", "ends early"]
)
def test_a_wrong_token_is_an_error(batch: TokenBatch) -> None:
    with pytest.raises(StreamError, match=UID):
        _World().door().on_tokens(batch)


def test_a_lost_attempt_is_submitted_again_with_what_was_accepted() -> None:
    world = _World()
    door = world.door()
    door.on_tokens(_tokens(0))
    door.on_notices([DoorNotice(UID, ErrorKind.WORKER_LOST, "gone", retriable=True)])
    world.events.run_until(5.0)
    assert [spec.accepted_token_ids for spec in world.submitted] == [(), (drawn_token(0, 0),)]
    door.on_tokens(_tokens(1, is_last=True))
    assert world.cancelled == [UID]


def test_a_notice_that_is_not_retriable_ends_the_stream_as_failed() -> None:
    door = _World().door()
    door.on_notices([DoorNotice(UID, ErrorKind.NEVER_FITS, "too long")])
    assert door.num_open == 0
    assert door.streams[UID].failure == "never_fits: too long"
