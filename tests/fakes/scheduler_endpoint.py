"""`FakeCluster`: a central scheduler and its workers as a door sees them, in one object without a model.

Tokens are a pure function of (prompt, seed, choice, position), so that a resubmitted request goes on where
it was; the end of a stream is decided by the workers' own `StopChecker`. `step` draws one token for every
running request and hands it to the door.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from itertools import count

from manager import Epoch, WorkerName
from scheduler.durations import PhaseDurations
from scheduler.messages import DoorNotice, ErrorKind, SubmitReply, TokenBatch, TokenEvent
from scheduler.request import Request
from scheduler.spec import AttemptId, DoorName, RequestSpec, RequestUid
from scheduler.states import AttemptState
from serving.endpoint import EndpointUnavailableError
from serving.frontend import Frontend
from serving.output_text import StopStringDetector
from serving.tokenizer import Tokenizer
from serving.workers.stop_checker import StopChecker

DrawToken = Callable[[RequestSpec, int], int]


def hashed_tokens(vocab_size: int) -> DrawToken:
    """Any token, special ones included, by a hash of the request and the position."""

    def draw(spec: RequestSpec, position: int) -> int:
        key = repr((spec.prompt_token_ids, spec.sampling.seed, spec.sampling.choice, position)).encode()
        return int.from_bytes(blake2b(key, digest_size=8).digest()) % vocab_size

    return draw


def spoken_tokens(token_ids: Sequence[int]) -> DrawToken:
    """These tokens, over and over."""
    return lambda _, position: token_ids[position % len(token_ids)]


class FakeCluster:
    """See the module.

    Attributes:
        submissions: every submission, in order.
        cancelled: every uid that was cancelled.
        running: requests that will get tokens.
        refusals: answers to the next submissions; None accepts.
        is_reachable: False makes every call fail.
        unhealthy: the reason why work cannot progress, or empty.
        delivers: a filter on events, to lose or repeat them.
    """

    def __init__(self, tokenizer: Tokenizer, eos_token_ids: Sequence[int], draw: DrawToken) -> None:
        """Args.

        tokenizer: for stop strings.
        eos_token_ids: the model's.
        draw: the tokens.
        """
        self.draw = draw
        self.submissions: list[tuple[RequestSpec, ...]] = []
        self.cancelled: list[RequestUid] = []
        self.running: dict[RequestUid, Request] = {}
        self.refusals: list[ErrorKind | None] = []
        self.is_reachable = True
        self.unhealthy = ""
        self.delivers: Callable[[TokenEvent], Sequence[TokenEvent]] = lambda event: (event,)
        self.cached_tokens = 0
        self.answers = asyncio.Event()
        self.answers.set()
        self._frontend: Frontend | None = None
        self._checker = StopChecker(eos_token_ids, lambda *stops: StopStringDetector(tokenizer, *stops))
        self._attempt_numbers = count(1)
        self._pump: asyncio.Task[None] | None = None

    def serve(self, frontend: Frontend) -> None:
        """Tokens go to this door."""
        self._frontend = frontend

    # -- SchedulerEndpoint -------------------------------------------------------------------------

    async def submit(self, specs: Sequence[RequestSpec]) -> SubmitReply:
        """See SchedulerEndpoint."""
        await self._call()
        self.submissions.append(tuple(specs))
        kind = self.refusals.pop(0) if self.refusals else None
        if kind is not None:
            return SubmitReply(tuple(DoorNotice(spec.uid, kind, f"refused: {kind}") for spec in specs))
        for spec in specs:
            if spec.uid not in self.running:
                attempt = AttemptId(f"1.{next(self._attempt_numbers)}")
                self.running[spec.uid] = Request(spec, attempt, AttemptState.CONTEXT_INIT, arrival=0, now_s=0.0)
        return SubmitReply()

    async def cancel(self, uids: Sequence[RequestUid]) -> None:
        """See SchedulerEndpoint."""
        await self._call()
        self.cancelled += uids
        for uid in uids:
            self.running.pop(uid, None)

    async def cluster_state(self) -> Mapping[str, object]:
        """See SchedulerEndpoint."""
        await self._call()
        central = {"term": 1, "queued": 0, "running": len(self.running), "waiting_offer": 0, "deferred": 0}
        return {"workers": [], "central": central, "counters": {}}

    async def health(self) -> tuple[bool, str]:
        """See SchedulerEndpoint."""
        await self._call()
        return not self.unhealthy, self.unhealthy

    async def _call(self) -> None:
        await self.answers.wait()
        if not self.is_reachable:
            msg = "no scheduler"
            raise EndpointUnavailableError(msg)

    # -- workers -----------------------------------------------------------------------------------

    def step(self) -> None:
        """One token for every running request."""
        self.deliver([event for request in list(self.running.values()) for event in self._draw(request)])

    def deliver(self, events: Sequence[TokenEvent]) -> None:
        """Hand events to the door as one batch."""
        assert self._frontend is not None
        self._frontend.on_tokens(TokenBatch(WorkerName("generation-0"), Epoch(1), DoorName("door"), tuple(events)))

    def start(self, pause_s: float = 0.0) -> None:
        """Step for ever, in the background of the running loop."""

        async def pump() -> None:
            while True:
                self.step()
                await asyncio.sleep(pause_s)

        self._pump = asyncio.get_running_loop().create_task(pump())

    async def stop(self) -> None:
        """End the background steps."""
        if self._pump is not None:
            self._pump.cancel()
            await asyncio.gather(self._pump, return_exceptions=True)

    def lose_attempts(self, kind: ErrorKind = ErrorKind.WORKER_LOST, *, retriable: bool = True) -> None:
        """All running attempts die."""
        assert self._frontend is not None
        lost = list(self.running)
        self.running.clear()
        self._frontend.on_notices(DoorNotice(uid, kind, "worker generation-0 was lost", retriable) for uid in lost)

    def _draw(self, request: Request) -> Sequence[TokenEvent]:
        position = request.num_generated
        is_first = position == len(request.spec.accepted_token_ids)
        token_id = self.draw(request.spec, position)
        reason = self._checker.check(request, token_id)
        request.append_token(token_id)
        if reason is not None:
            self._checker.forget(request.attempt_id)
            self.running.pop(request.spec.uid, None)
        durations = None
        if is_first or reason is not None:
            phases = {"queue": 0.25, "context": 0.5, "transfer": 0.125, "generation": 0.0625 * position}
            durations = PhaseDurations(WorkerName("generation-0"), phases, self.cached_tokens)
        return self.delivers(TokenEvent(request.spec.uid, request.attempt_id, position, token_id, reason, durations))
