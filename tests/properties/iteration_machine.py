"""A hypothesis machine over the real iteration scheduler and the real manager.

Requests of every kind arrive and are cancelled, transfers and leases end well or badly, steps fail, and
manager calls are refused or raise. After every rule the manager's audit is clean. At the end everything
still here is let run: each request ends exactly once, in a bounded number of passes, with the tokens of
the rule, and nothing is held.
"""

from collections import Counter
from dataclasses import dataclass
from itertools import count
from typing import ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from configs import SchedulerConfig, SchedulingPolicy
from configs.scheduling import ChunkingPolicy
from manager import CacheConfigError, LeaseId
from scheduler.admission import TransferAdmission
from scheduler.errors import RequestTooLarge
from scheduler.messages import WorkerRole
from scheduler.output import SchedulerOutput
from scheduler.request import Request
from tests.fakes.attempts import make_spec
from tests.fakes.call_log import CallLog, Injected
from tests.fakes.iteration_worker import IterationWorker, drawn_token, make_worker
from tests.fakes.small_cache import Members, make_cache

PICK = st.integers(0, 1 << 20)
WINDOW_BYTES = 2500


@dataclass(frozen=True, slots=True)
class Sizes:
    """The limits of one example, from the smallest that a request can live with."""

    num_pages: int
    max_sequences: int
    host_pages: int
    resume_watermark: float
    members: Members
    config: SchedulerConfig


@st.composite
def sizes(draw: st.DrawFn) -> Sizes:
    """Pools down to two pages, batches down to one."""
    num_pages = draw(st.sampled_from([6, 5, 8, 7, 4, 10, 14, 3, 2]))
    max_sequences = min(num_pages, draw(st.sampled_from([4, 6, 3, 4, 6, 2, 5, 4, 1])))
    unit = draw(st.sampled_from([4, 2, 1, 8]))
    config = SchedulerConfig(
        max_num_tokens=draw(st.sampled_from([24, 16, 12, 8])),
        max_batch_size=max(1, max_sequences - draw(st.sampled_from([0, 0, 0, 0, 0, 1, 3]))),
        chunk_unit_tokens=unit,
        max_context_tokens_beside_decodes=draw(st.sampled_from([0, unit, 2 * unit])),
        policy=draw(st.sampled_from([*SchedulingPolicy, SchedulingPolicy.MAX_UTILIZATION])),
        chunking=draw(st.sampled_from(ChunkingPolicy)),
        arrivals_per_priority=draw(st.integers(0, 5)),
        defer_duplicate_prefixes=draw(st.booleans()),
        fresh_generation_first=draw(st.booleans()),
    )
    return Sizes(
        num_pages,
        max_sequences,
        host_pages=draw(st.sampled_from([0, 0, 3, 20])),
        resume_watermark=draw(st.sampled_from([1.0, 0.4])),
        members=Members(
            draft=draw(st.booleans()),
            draft_padding=draw(st.integers(0, 2)),
            cross=draw(st.booleans()),
            adapter_pages=draw(st.sampled_from([0, 2, 3, 4])),
        ),
        config=config,
    )


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request to be made; prompt and output are shares of what one request can have."""

    prompt_percent: int
    output_percent: int
    excess: int
    shared: int
    priority: int
    drafts: int
    is_offer: bool
    adapter: str | None
    encoder: int


def arrivals() -> st.SearchStrategy[Arrival]:
    """Mostly requests that several of fit, now and then one that needs the pool alone."""
    return st.builds(
        Arrival,
        prompt_percent=st.sampled_from([0, 5, 10, 20, 20, 30, 40, 60, 100]),
        output_percent=st.sampled_from([0, 20, 50, 70, 100, 100]),
        excess=st.sampled_from([0] * 12 + [1, 9]),
        shared=st.sampled_from([0, 0, 1, 2]),
        priority=st.integers(-1, 2),
        drafts=st.integers(0, 4),
        is_offer=st.booleans(),
        adapter=st.sampled_from([None, None, "a", "b", "c"]),
        encoder=st.sampled_from([0, 0, 1, 3, 4, 8]),
    )


class IterationMachine(RuleBasedStateMachine):
    """One worker, any number of requests.

    Attributes:
        totals: what happened in all examples of a class so far, to show that they reach the interesting cases.
    """

    totals: ClassVar[Counter[str]] = Counter()
    worker: IterationWorker
    log: CallLog

    @initialize(chosen=sizes(), role=st.sampled_from(WorkerRole))
    def start(self, chosen: Sizes, role: WorkerRole) -> None:
        """A worker of a role, with sizes."""
        logs: list[CallLog] = []

        def wrap(manager: object) -> CallLog:
            logs.append(CallLog(manager))  # type: ignore[arg-type]
            return logs[0]

        self.window = TransferAdmission(WINDOW_BYTES)
        self.worker = make_worker(
            role,
            num_pages=self._least_pages(chosen),
            max_sequences=chosen.max_sequences,
            host_pages=chosen.host_pages,
            resume_watermark=chosen.resume_watermark,
            members=chosen.members,
            config=chosen.config,
            window=self.window,
            wrap=wrap,
        )
        self.role = role
        self.sizes = chosen
        self.log = logs[0]
        self.live: dict[str, Request] = {}
        self.receiving: list[Request] = []
        self.leases: list[LeaseId] = []
        self.ends: Counter[str] = Counter()
        self.complete_ends: list[Request] = []
        self.num_arrived = 0
        self.num_refused = 0
        self.was_refused = False

    @staticmethod
    def _least_pages(chosen: Sizes) -> int:
        """The chosen number of pages, or the smallest that a cache with these members is accepted with."""
        for num_pages in count(chosen.num_pages):
            try:
                make_cache(num_pages=num_pages, max_sequences=chosen.max_sequences, members=chosen.members)
            except CacheConfigError:
                continue
            return num_pages
        raise AssertionError

    # -- arrivals ------------------------------------------------------------------------------------

    @rule(arrivals=st.lists(arrivals(), min_size=1, max_size=5))
    def arrive(self, arrivals: list[Arrival]) -> None:
        """Requests whose prompts begin like those of a few others."""
        for arrival in arrivals:
            self._arrive(arrival)

    def _arrive(self, arrival: Arrival) -> None:
        name = f"r{self.num_arrived}"
        is_offer = arrival.is_offer and self.role is not WorkerRole.CONTEXT
        room = self.worker.manager.max_request_tokens
        least = 1 + is_offer
        prompt = 1 + arrival.prompt_percent * (room - 1 - least) // 100
        max_tokens = least + arrival.output_percent * (room - prompt - least) // 100 + arrival.excess
        tokens = tuple(
            1 + arrival.shared if position < 5 + 4 * arrival.shared else position * 7 + self.num_arrived
            for position in range(prompt)
        )
        members = self.sizes.members
        spec = make_spec(
            name,
            tokens,
            max_tokens=max_tokens,
            priority=arrival.priority,
            adapter=arrival.adapter if members.adapter_pages else None,
            encoder=tuple(range(arrival.encoder)) if members.cross else (),
        )
        self.num_arrived += 1
        try:
            request = self.worker.offer(spec) if is_offer else self.worker.context(spec)
        except RequestTooLarge:
            assert self._could_never_fit(prompt, max_tokens)
            return
        request.num_draft_tokens = arrival.drafts
        self.live[name] = request

    def _could_never_fit(self, prompt: int, max_tokens: int) -> bool:
        needed = prompt if self.role is WorkerRole.CONTEXT else prompt + max_tokens
        return needed > self.worker.manager.max_request_tokens

    # -- passes --------------------------------------------------------------------------------------

    @precondition(lambda self: self.live)
    @rule(times=st.integers(1, 12), accept=st.integers(0, 4))
    def iterate(self, times: int, accept: int) -> None:
        """Passes with their steps."""
        for _ in range(times):
            self._close(self._pass(), accept=accept)

    @precondition(lambda self: self.live)
    @rule()
    def fail_a_step(self) -> None:
        """The engine raises."""
        output = self._pass()
        if output.has_step:
            for request in self.worker.abandon(output).failed:
                self._ended(request)

    @precondition(lambda self: self.live)
    @rule(call=st.one_of(st.integers(0, 8), st.integers(0, 40)))
    def refuse_a_call(self, call: int) -> None:
        """Some call of the pass is refused though there was room."""
        self.log.aim(refuse_in=call)
        self._close(self._pass(may_be_stuck=True))
        self.log.aim()

    @precondition(lambda self: self.live)
    @rule(call=st.one_of(st.integers(0, 8), st.integers(0, 40)))
    def raise_in_a_pass(self, call: int) -> None:
        """A manager call raises: the pass leaves no trace."""
        before = (self.worker.manager.snapshot(), self._seen())
        self.log.aim(raise_in=call)
        try:
            output = self._pass()
        except Injected:
            assert (self.worker.manager.snapshot(), self._seen()) == before
        else:
            self.log.aim()
            self._close(output)

    @precondition(lambda self: self.live)
    @rule(call=st.integers(0, 20))
    def raise_in_a_completion(self, call: int) -> None:
        """A manager call raises after the step: the step stays open and can be completed or abandoned."""
        output = self._pass()
        if not output.has_step:
            return
        before = (self.worker.manager.snapshot(), self._seen())
        self.log.aim(raise_in=call)
        try:
            self._close(output)
        except Injected:
            assert (self.worker.manager.snapshot(), self._seen()) == before
            self._close(output)
        self.log.aim()

    # -- ends from outside ---------------------------------------------------------------------------

    @precondition(lambda self: self.live)
    @rule(pick=PICK, fails=st.booleans())
    def cancel(self, pick: int, *, fails: bool) -> None:
        """An attempt ends in whatever state it is."""
        request = list(self.live.values())[pick % len(self.live)]
        end = self.worker.scheduler.fail if fails else self.worker.scheduler.cancel
        assert end(request.attempt_id, 0.0) is request
        assert end(request.attempt_id, 0.0) is None
        self._ended(request)

    @precondition(lambda self: self.receiving)
    @rule(pick=PICK, succeeds=st.booleans())
    def end_a_receive(self, pick: int, *, succeeds: bool) -> None:
        """A transfer is verified, or comes to nothing; its attempt may have been cancelled."""
        self._end_receive(self.receiving.pop(pick % len(self.receiving)), succeeds=succeeds)

    @precondition(lambda self: self.leases)
    @rule(pick=PICK, settled=st.booleans())
    def end_a_lease(self, pick: int, *, settled: bool) -> None:
        """A reader has what it wanted, or was too late."""
        self._end_lease(self.leases.pop(pick % len(self.leases)), settled=settled)

    # -- what must hold --------------------------------------------------------------------------------

    @invariant()
    def nothing_contradicts_itself(self) -> None:
        """The manager's audit, and one place for each request."""
        if not hasattr(self, "worker"):
            return
        self.worker.manager.audit()
        scheduler = self.worker.scheduler
        here = [*scheduler.running, *scheduler.waiting]
        assert sorted(request.attempt_id for request in here) == sorted(self.live)
        for request in scheduler.waiting:
            assert not self.worker.manager.has_cache(request.request_id)

    def teardown(self) -> None:
        """Let everything end; hypothesis calls this after the last rule."""
        if hasattr(self, "worker"):
            self.log.aim()
            self._drain()
            self.totals.update(self.worker.scheduler.counters())
            self.totals["refused"] += self.log.num_refused

    def _drain(self) -> None:
        final = sum(len(r.token_ids) + r.spec.stop.max_tokens for r in self.live.values())
        for _ in range(100 + 10 * final):
            while self.receiving:
                self._end_receive(self.receiving.pop(0), succeeds=True)
            while self.leases:
                self._end_lease(self.leases.pop(0), settled=True)
            if not self.live:
                break
            self._close(self._pass())
            self.worker.manager.audit()
        assert not self.live, f"not ended within the bound: {list(self.live.values())}"
        assert set(self.ends.values()) <= {1}
        self._check_baseline()
        for request in self.complete_ends:
            first = self.worker.num_received_elsewhere(request)
            expected = [drawn_token(request.attempt_id, at) for at in range(first, request.spec.stop.max_tokens)]
            assert self.worker.tokens[request.attempt_id] == expected

    def _check_baseline(self) -> None:
        manager = self.worker.manager
        assert dict(manager.availability().pages) == dict(self.worker.scheduler._shape.total_pages)
        assert manager.availability().index_slots == self.sizes.max_sequences
        assert manager.availability().adapter_pages == self.sizes.members.adapter_pages
        assert self.window.taken_bytes == 0
        assert not self.worker.scheduler.has_work

    # -- bookkeeping of the test -----------------------------------------------------------------------

    def _pass(self, *, may_be_stuck: bool = False) -> SchedulerOutput:
        had_work = self.worker.scheduler.has_work
        output = self.worker.schedule()
        # `has_work` may be trusted, except after a refusal without a reason.
        assert had_work or self.was_refused or not (output.has_step or output.reserved)
        self.was_refused = self.log.num_refused > self.num_refused
        self.num_refused = self.log.num_refused
        assert may_be_stuck or output.deadlock is None, output.deadlock
        assert output.num_rows <= self.sizes.config.max_num_tokens
        assert len(output.contexts) + len(output.generations) <= self.sizes.config.max_batch_size
        beside_decodes = self.sizes.config.max_context_tokens_beside_decodes
        if beside_decodes and output.generations:
            assert sum(chunk.num_tokens for chunk in output.contexts) <= beside_decodes
        for chunk in output.contexts:
            assert chunk.is_last or chunk.num_tokens % self.sizes.config.chunk_unit_tokens == 0
        for request, _ in output.deferred:
            self._ended(request)
        assert not output.failed
        self.receiving += output.reserved
        return output

    def _close(self, output: SchedulerOutput, *, accept: int = 0) -> None:
        if not output.has_step:
            return
        completed = self.worker.complete(output, accept=accept)
        self.leases += [lease.lease_id for _, lease in completed.leases]
        for request in completed.finished:
            self.complete_ends += [request] if self.role is not WorkerRole.CONTEXT else []
            self._ended(request)

    def _end_receive(self, request: Request, *, succeeds: bool) -> None:
        if succeeds:
            assert (self.worker.receive(request) is None) == request.is_terminal
        elif self.worker.lose(request) is request:
            self._ended(request)

    def _end_lease(self, lease_id: LeaseId, *, settled: bool) -> None:
        request = self.worker.end_lease(lease_id, settled=settled)
        assert request is not None
        if request.attempt_id in self.live:
            self._ended(request)

    def _ended(self, request: Request) -> None:
        assert self.live.pop(request.attempt_id) is request
        self.ends[request.attempt_id] += 1

    def _seen(self) -> object:
        """All that a caller can see of the scheduler and its requests, but counts of passes."""
        scheduler = self.worker.scheduler
        requests = {
            name: (request.state, tuple(request.token_ids), request.num_reused_tokens, len(request.history))
            for name, request in self.live.items()
        }
        counters = {k: v for k, v in scheduler.counters().items() if k != "iterations"}
        return (
            requests,
            [request.attempt_id for request in scheduler.running],
            [request.attempt_id for request in scheduler.waiting],
            counters,
            self.window.taken_bytes,
        )
