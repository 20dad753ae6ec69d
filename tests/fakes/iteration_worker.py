"""A worker without an engine: the real iteration scheduler over a real manager and real pages; tokens by rule.

A step reads all that its requests have computed and writes what the engine would (`StepContents`). The token
that a request draws at a position is a function of its name and the position only, so that two runs of one
request can be compared whatever happened to it in between.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from configs import SchedulerConfig
from manager import CacheMember, KVCacheManager, KVCacheManagerV2, LeaseId, PageLease, RequestId
from scheduler.admission import TransferWindow
from scheduler.kv_cache_v2_scheduler import KVCacheV2Scheduler
from scheduler.messages import Handoff, WorkerRole
from scheduler.output import AbandonedStep, CompletedStep, DrawnToken, SchedulerOutput
from scheduler.request import Request
from scheduler.spec import AttemptId, FinishReason, RequestSpec
from scheduler.states import AttemptEvent, AttemptState
from tests.fakes.attempts import make_handoff
from tests.fakes.small_cache import PRIMARY_ONLY, Members, make_cache, shape_of
from tests.fakes.step_contents import StepContents

FIRST_TOKEN_ELSEWHERE = 7


def drawn_token(name: str, position: int) -> int:
    """What `name` draws at `position`; never a token of a made-up prompt."""
    return 10_000_000 + 1000 * (sum(map(ord, name)) * 7919 % 10_000) + position


@dataclass(slots=True)
class IterationWorker:
    """Drives passes and steps, and keeps what came of them."""

    manager: KVCacheManagerV2
    scheduler: KVCacheV2Scheduler
    contents: StepContents
    outputs: list[SchedulerOutput] = field(default_factory=list)
    leases: dict[str, LeaseId] = field(default_factory=dict)
    leased: dict[LeaseId, tuple[PageLease, Request, tuple[int, ...]]] = field(default_factory=dict)
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
        assert self.manager.finish_fills() == ()
        for request in output.reserved:
            self.contents.begin_transfer(self.manager, request.request_id)
        self.contents.read_on()
        return output

    def complete(self, output: SchedulerOutput, *, accept: int = 0) -> CompletedStep:
        """Close the step with the tokens of the rule; a request ends at its `max_tokens`.

        Args:
            output: the open step.
            accept: drafts accepted of each request, as far as it had so many.
        """
        drawers = [(chunk.request, 0) for chunk in output.contexts if chunk.is_last]
        drawers += zip(output.generations, output.draft_lengths, strict=True)
        lags = any(group.member is CacheMember.DRAFT for group in self.manager.geometry.layer_groups)
        drawn = {request.request_id: _draw(request, min(accept, length), length, lags) for request, length in drawers}
        self._compute(output, drawn)
        completed = self.scheduler.complete(output, drawn, 0.0)
        for request, position, token in completed.tokens:
            kept = self.tokens.setdefault(str(request.attempt_id), [])
            assert position == len(request.spec.accepted_token_ids) + self.num_received_elsewhere(request) + len(kept)
            kept.append(token.token_id)
        self.leases.update({str(request.attempt_id): lease.lease_id for request, lease in completed.leases})
        self.leased.update(
            {lease.lease_id: (lease, request, tuple(request.token_ids)) for request, lease in completed.leases}
        )
        self.finished.extend(completed.finished)
        return completed

    def _compute(self, output: SchedulerOutput, drawn: Mapping[RequestId, DrawnToken]) -> None:
        """Read every history of the step, then write its positions; rejected drafts leave garbage."""
        for chunk in output.contexts:
            if not chunk.request.is_terminal:
                self._write(chunk.request, chunk.request.token_ids, chunk.num_tokens, 0)
        for request, num_drafts in zip(output.generations, output.draft_lengths, strict=True):
            if not request.is_terminal:
                accepted = drawn[request.request_id].accepted_token_ids
                num_rejected = num_drafts - len(accepted)
                self._write(request, [*request.token_ids, *accepted], 1 + len(accepted), num_rejected)

    def _write(self, request: Request, tokens: Sequence[int], num_tokens: int, num_rejected: int) -> None:
        manager, contents = self.manager, self.contents
        start = manager.history_length(request.request_id)
        contents.check(manager, request, tokens)
        contents.write(manager, request, tokens, range(start, start + num_tokens))
        rejected = range(start + num_tokens, start + num_tokens + num_rejected)
        contents.spoil(manager, request, rejected, with_encoder=False)

    def abandon(self, output: SchedulerOutput) -> AbandonedStep:
        """The step fails after it has written garbage wherever it was allowed to."""
        spans = [(chunk.request, chunk.num_tokens) for chunk in output.contexts]
        spans += [
            (request, 1 + drafts) for request, drafts in zip(output.generations, output.draft_lengths, strict=True)
        ]
        for request, num_tokens in spans:
            if not request.is_terminal:
                start = self.manager.history_length(request.request_id)
                self.contents.spoil(self.manager, request, range(start, start + num_tokens), with_encoder=True)
        return self.scheduler.abandon(output, 0.0)

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
        """Its transfer arrived and is verified; an attempt that ended meanwhile gets nothing."""
        if not request.is_terminal:
            start = self.manager.history_length(request.request_id)
            span = range(start, request.prompt_length)
            self.contents.write(self.manager, request, request.token_ids, span)
        self.contents.end_transfer(request.request_id)
        return self.scheduler.on_received(request.request_id, FIRST_TOKEN_ELSEWHERE, 0.0)

    def lose(self, request: Request) -> Request | None:
        """Its transfer came to nothing, and no read runs any more."""
        self.contents.end_transfer(request.request_id)
        return self.scheduler.on_receive_ended(request.request_id, 0.0)

    def end_lease(self, lease_id: LeaseId, *, settled: bool) -> Request | None:
        """The reader has read all that was leased, or gave up."""
        self.contents.check_lease(*self.leased.pop(lease_id))
        return self.scheduler.on_lease_ended(lease_id, 0.0, settled=settled)

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
            self.end_lease(self.leases.pop(name), settled=True)
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
    members: Members = PRIMARY_ONLY,
) -> IterationWorker:
    """A worker with blocks of 4 tokens; `wrap` puts something between scheduler and manager."""
    manager, contents = make_cache(
        num_pages=num_pages,
        max_sequences=max_sequences,
        host_pages=host_pages,
        resume_watermark=resume_watermark,
        members=members,
    )
    used = SchedulerConfig(max_num_tokens=32, max_batch_size=min(max_sequences, num_pages), chunk_unit_tokens=4)
    scheduler = KVCacheV2Scheduler(
        used if config is None else config, wrap(manager), role, shape_of(manager, members), window=window
    )
    return IterationWorker(manager, scheduler, contents)


def _attempt(spec: RequestSpec) -> AttemptId:
    return AttemptId(spec.uid.removeprefix("uid-"))


def _draw(request: Request, num_accepted: int, num_drafts: int, lags: bool) -> DrawnToken:
    """After a step whose drafts are all accepted, the draft has not computed the last of them itself."""
    first = request.num_generated
    position = min(first + num_accepted, max(first, request.spec.stop.max_tokens - 1))
    is_last = position + 1 >= request.spec.stop.max_tokens
    name = request.attempt_id
    return DrawnToken(
        drawn_token(name, position),
        FinishReason.LENGTH if is_last else None,
        accepted_token_ids=tuple(drawn_token(name, accepted) for accepted in range(first, position)),
        draft_lag=int(lags and position - first == num_drafts > 0),
    )
