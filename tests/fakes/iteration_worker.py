"""A worker without an engine: the real iteration scheduler over a real manager, and tokens made up by rule.

The token that a request draws at a position is a function of its name and the position only, so that two
runs of one request can be compared whatever happened to it in between.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from configs import SchedulerConfig
from manager import KVCacheManager, KVCacheManagerV2, LeaseId
from scheduler.admission import TransferWindow
from scheduler.kv_cache_v2_scheduler import KVCacheV2Scheduler
from scheduler.messages import Handoff, WorkerRole
from scheduler.output import CompletedStep, DrawnToken, SchedulerOutput
from scheduler.request import Request
from scheduler.spec import AttemptId, FinishReason, RequestSpec
from scheduler.states import AttemptEvent, AttemptState
from tests.fakes.attempts import make_handoff
from tests.fakes.small_cache import make_manager, shape_of

FIRST_TOKEN_ELSEWHERE = 7


def drawn_token(name: str, position: int) -> int:
    """What `name` draws at `position`; never a token of a made-up prompt."""
    return 10_000_000 + 1000 * (sum(map(ord, name)) * 7919 % 10_000) + position


@dataclass(slots=True)
class IterationWorker:
    """Drives passes and steps, and keeps what came of them."""

    manager: KVCacheManagerV2
    scheduler: KVCacheV2Scheduler
    outputs: list[SchedulerOutput] = field(default_factory=list)
    leases: dict[str, LeaseId] = field(default_factory=dict)
    finished: list[Request] = field(default_factory=list)
    tokens: dict[str, list[int]] = field(default_factory=dict)

    def context(self, spec: RequestSpec) -> Request:
        """Queue a context under its uid without the prefix."""
        return self.scheduler.add_context(_attempt(spec), spec, 0.0)

    def offer(self, spec: RequestSpec, handoff: Handoff | None = None) -> Request:
        """Queue an offer."""
        made = make_handoff(FIRST_TOKEN_ELSEWHERE) if handoff is None else handoff
        return self.scheduler.add_generation_offer(_attempt(spec), spec, made, 0.0)

    def schedule(self) -> SchedulerOutput:
        """One pass; the step stays open."""
        output = self.scheduler.schedule(0.0)
        self.outputs.append(output)
        return output

    def complete(self, output: SchedulerOutput, *, accept: int = 0) -> CompletedStep:
        """Close the step with the tokens of the rule; a request ends at its `max_tokens`.

        Args:
            output: the open step.
            accept: drafts accepted of each request, as far as it had so many.
        """
        drawers = [(chunk.request, 0) for chunk in output.contexts if chunk.is_last]
        drawers += zip(output.generations, output.draft_lengths, strict=True)
        drawn = {request.request_id: _draw(request, min(accept, length)) for request, length in drawers}
        completed = self.scheduler.complete(output, drawn, 0.0)
        for request, position, token in completed.tokens:
            kept = self.tokens.setdefault(str(request.attempt_id), [])
            assert position == len(request.spec.accepted_token_ids) + self.num_received_elsewhere(request) + len(kept)
            kept.append(token.token_id)
        self.leases.update({str(request.attempt_id): lease.lease_id for request, lease in completed.leases})
        self.finished.extend(completed.finished)
        return completed

    def num_received_elsewhere(self, request: Request) -> int:
        """1 when its first token came with a handoff, else 0."""
        return sum(change.event is AttemptEvent.ACTIVATED for change in request.history)

    def step(self) -> SchedulerOutput:
        """One pass, and its step when it has one."""
        output = self.schedule()
        if output.has_step:
            self.complete(output)
        return output

    def receive(self, request: Request) -> Request | None:
        """Its transfer arrived and is verified."""
        return self.scheduler.on_received(request.request_id, FIRST_TOKEN_ELSEWHERE, 0.0)

    def admit_generation(self, spec: RequestSpec) -> Request:
        """Offer, reserve and receive: it decodes from the next pass on."""
        request = self.offer(spec)
        output = self.step()
        assert output.reserved == (request,), output
        assert self.receive(request) is request
        return request

    def settle(self) -> None:
        """End every transfer and lease well, and run until nothing is left."""
        for output in self.outputs:
            for request in output.reserved:
                if request.state is AttemptState.DISAGG_GENERATION_TRANS_IN_PROGRESS:
                    self.receive(request)
        self.run_until_idle()
        for name in list(self.leases):
            self.scheduler.on_lease_ended(self.leases.pop(name), 0.0, settled=True)
        assert not self.scheduler.running, self.scheduler.running
        assert not self.scheduler.waiting, self.scheduler.waiting

    def run_until_idle(self, max_passes: int = 500) -> int:
        """Step until nothing can run; returns the number of passes."""
        for count in range(max_passes):
            if not self.scheduler.has_work:
                return count
            self.step()
        msg = f"still working after {max_passes} passes: {self.scheduler.running} {self.scheduler.waiting}"
        raise AssertionError(msg)


def make_worker(  # noqa: PLR0913 -- the knobs of a test
    role: WorkerRole = WorkerRole.MIXED,
    *,
    num_pages: int = 16,
    max_sequences: int = 8,
    host_pages: int = 0,
    resume_watermark: float = 1.0,
    config: SchedulerConfig | None = None,
    window: TransferWindow | None = None,
    wrap: Callable[[KVCacheManager], KVCacheManager] = lambda manager: manager,
) -> IterationWorker:
    """A worker with blocks of 4 tokens; `wrap` puts something between scheduler and manager."""
    manager = make_manager(
        num_pages=num_pages, max_sequences=max_sequences, host_pages=host_pages, resume_watermark=resume_watermark
    )
    used = SchedulerConfig(max_num_tokens=32, max_batch_size=min(max_sequences, num_pages), chunk_unit_tokens=4)
    scheduler = KVCacheV2Scheduler(
        used if config is None else config, wrap(manager), role, shape_of(manager), window=window
    )
    return IterationWorker(manager, scheduler)


def _attempt(spec: RequestSpec) -> AttemptId:
    return AttemptId(spec.uid.removeprefix("uid-"))


def _draw(request: Request, num_accepted: int) -> DrawnToken:
    first = request.num_generated
    position = min(first + num_accepted, max(first, request.spec.stop.max_tokens - 1))
    is_last = position + 1 >= request.spec.stop.max_tokens
    name = request.attempt_id
    return DrawnToken(
        drawn_token(name, position),
        FinishReason.LENGTH if is_last else None,
        accepted_token_ids=tuple(drawn_token(name, accepted) for accepted in range(first, position)),
    )
