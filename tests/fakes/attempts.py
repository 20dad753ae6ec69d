"""Builders of request specs and attempts for scheduler tests."""

from dataclasses import dataclass

from manager import AdapterId, Epoch, LeaseId, WorkerName
from scheduler.messages import Handoff
from scheduler.request import Request
from scheduler.spec import AttemptId, DoorName, RequestSpec, RequestUid, SamplingParams, StopParams
from scheduler.states import AttemptState


@dataclass(frozen=True, slots=True)
class PlainTicket:
    """A ticket of a context worker that is not part of the test."""

    owner: WorkerName
    epoch: Epoch
    lease_id: LeaseId
    num_tokens: int
    total_bytes: int


def make_spec(  # noqa: PLR0913 -- the knobs of a test
    name: str,
    prompt: int | tuple[int, ...] = 8,
    *,
    max_tokens: int = 8,
    priority: int = 0,
    accepted: tuple[int, ...] = (),
    adapter: str | None = None,
    encoder: tuple[int, ...] = (),
) -> RequestSpec:
    """A spec; a prompt given as a length gets token ids that no other name shares."""
    if isinstance(prompt, int):
        start = 1000 + 1000 * (sum(map(ord, name)) * 7919 % 10_000)
        prompt = tuple(range(start, start + prompt))
    return RequestSpec(
        uid=RequestUid(f"uid-{name}"),
        door=DoorName("door"),
        prompt_token_ids=prompt,
        sampling=SamplingParams(temperature=0.0),
        stop=StopParams(max_tokens=max_tokens),
        accepted_token_ids=accepted,
        priority=priority,
        adapter_id=None if adapter is None else AdapterId(adapter),
        encoder_token_ids=encoder,
    )


def make_request(
    name: str, prompt: int | tuple[int, ...] = 8, *, arrival: int = 0, priority: int = 0, max_tokens: int = 8
) -> Request:
    """An attempt that waits for its context."""
    spec = make_spec(name, prompt, priority=priority, max_tokens=max_tokens)
    return Request(spec, AttemptId(name), AttemptState.CONTEXT_INIT, arrival=arrival, now_s=0.0)


def make_handoff(first_token_id: int = 7, *, total_bytes: int = 1000) -> Handoff:
    """A finished context elsewhere."""
    ticket = PlainTicket(WorkerName("context-0"), Epoch(1), LeaseId(1), num_tokens=1, total_bytes=total_bytes)
    return Handoff(ticket, first_token_id)


def state_of(request: Request) -> AttemptState:
    """Its state now; a call, so that a type checker does not take it for unchanged since the last look."""
    return request.state
