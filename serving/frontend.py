"""`Frontend`: owns every open request and its token stream (C9), against any scheduler endpoint.

Runs on one event loop; every method is called on it. Workers' events come in through `on_tokens`, the
central scheduler's through `on_notices`. A lost attempt is resubmitted with what was accepted
(`serving.recovery`), so that the client sees no gap, no repeat and no change; everything that is no longer
wanted is cancelled.

    submit ─► choices ─► endpoint.submit ──────────────► tokens ─► ChoiceStream ─► OpenRequest.deltas
                 ▲                                          │
                 └── resubmit (same uid and seed, accepted tokens) ◄── retriable notice, or a lasting gap
"""

import asyncio
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from scheduler.messages import DoorNotice, ErrorKind, TokenBatch, TokenEvent
from scheduler.spec import AttemptId, DoorName, RequestSpec, RequestUid, Term
from serving.door_peers import DoorAccount, place_of
from serving.endpoint import EndpointUnavailableError, SchedulerEndpoint
from serving.generation_request import DoorSettings, GenerationRequest, RequestFailedError
from serving.metrics import StreamMetrics
from serving.open_request import OpenChoice, OpenRequest
from serving.output_text import OutputText
from serving.recovery import AttemptRecovery
from serving.scheduler_client import SchedulerClient
from serving.stream import Arrival, ChoiceStream
from serving.timeline import ChoiceTimeline, RequestTimeline, StreamState, TimelineBook
from serving.tokenizer import Tokenizer

_log = logging.getLogger(__name__)

_SWEEPS_PER_SILENCE = 4
_TOLD_REQUESTS = 40
"""Of the newest, to whoever shows them."""


class Frontend:
    """One door.

    Attributes:
        tokenizer: the model's.
        settings: limits and deadlines.
        metrics: what its streams did, for GET /metrics.
        trace_sink: takes every request that has ended, on the event loop; does nothing until it is set.
        closing: called by `close`, for what the HTTP layer started.
    """

    def __init__(
        self,
        endpoint: SchedulerEndpoint,
        tokenizer: Tokenizer,
        door: DoorName,
        settings: DoorSettings,
        *,
        clock: Callable[[], float],
        seed_source: Callable[[], int],
    ) -> None:
        """Args.

        endpoint: the central scheduler.
        tokenizer: the model's.
        door: this door's name; workers send its token events there.
        settings: limits and deadlines.
        clock: monotonic seconds.
        seed_source: a fresh seed in [0, 2**63) for a request that has none.
        """
        self.tokenizer = tokenizer
        self.settings = settings
        self.metrics = StreamMetrics(settings.model_name, place_of(door))
        self.trace_sink: Callable[[RequestTimeline], None] = _keep_no_trace
        self.closing: list[Callable[[], None]] = []
        self._door = door
        self._clock = clock
        self._seed_source = seed_source
        self._choices: dict[RequestUid, OpenChoice] = {}
        self._timelines = TimelineBook(settings.kept_timelines)
        self._counters: Counter[str] = Counter()
        self._term = Term(0)
        self._is_draining = False
        self._num_unanswered = 0
        self._is_closed = False
        self._scheduler = SchedulerClient(
            endpoint,
            submit_timeout_s=settings.submit_timeout_s,
            state_timeout_s=settings.health_timeout_s,
            restart_patience_s=settings.restart_patience_s,
            is_wanted=self._choices.__contains__,
        )
        self._recovery = AttemptRecovery(self._scheduler, settings, self._counters, clock=clock, fail=self._fail)
        self._sweep_timer: asyncio.TimerHandle | None = None

    # -- for the HTTP layer ------------------------------------------------------------------------

    async def submit(self, request: GenerationRequest) -> OpenRequest:
        """Queue a request.

        Returns:
            It, open; the caller closes it.

        Raises:
            RequestFailedError: the cluster refused it or cannot be reached; nothing is left of it.
        """
        if self._is_draining:
            msg = "this server is draining and takes no new requests"
            raise RequestFailedError(ErrorKind.NO_WORKER, msg)
        opened = self._open(request)
        specs = [choice.stream.spec for choice in opened.choices if choice.is_open]
        try:
            refused = (await self._scheduler.submit_patiently(specs)).refused if specs else ()
        except EndpointUnavailableError as error:
            self._fail(opened, ErrorKind.NO_WORKER, str(error))
        except BaseException:
            opened.close()
            raise
        else:
            if refused:
                self._fail(opened, refused[0].kind, refused[0].message)
        if opened.failure is not None:
            opened.close()
            raise opened.failure
        self._forget_when_ended(opened)
        return opened

    def timeline(self, api_id: str) -> dict[str, object] | None:
        """Where the time of a running or recent request went, ready for JSON; None when unknown."""
        timeline = self._timelines.get(api_id)
        return None if timeline is None else self._told(timeline)

    def account(self) -> DoorAccount:
        """What this door is and did, for whichever door is asked."""
        recent = self._timelines.recent(_TOLD_REQUESTS)
        return DoorAccount(
            self._state(),
            os.getpid(),
            self.metrics.families(len(self._choices)),
            self.metrics.recent,
            tuple(self._told(timeline) for timeline in recent),
        )

    def _told(self, timeline: RequestTimeline) -> dict[str, object]:
        return {**timeline.to_json(self._clock()), "door": place_of(self._door)}

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._is_closed

    async def health(self) -> tuple[bool, str]:
        """Whether a request submitted now can make progress, and the reason when it cannot."""
        if self._is_draining:
            return False, "draining"
        return await self._scheduler.health()

    async def cluster_state(self) -> dict[str, object]:
        """The cluster's account of itself, and this door's.

        Raises:
            RequestFailedError: the central scheduler cannot be reached.
        """
        try:
            state = await self._scheduler.cluster_state()
        except EndpointUnavailableError as error:
            raise RequestFailedError(ErrorKind.NO_WORKER, str(error)) from error
        return {**state, "door": self._state()}

    def _state(self) -> dict[str, object]:
        return {"name": self._door, "open_choices": len(self._choices), "counters": dict(self.counters())}

    # -- for the process that hosts the door -------------------------------------------------------

    def on_tokens(self, batch: TokenBatch) -> None:
        """Token events of one worker's step."""
        for event in batch.events:
            choice = self._choices.get(event.uid)
            if choice is None:
                self._counters["late_events"] += 1
            else:
                self._receive(choice, event)

    def on_notices(self, notices: Iterable[DoorNotice], term: Term | None = None) -> None:
        """Attempts that ended without a last token. A term below one that was seen is refused (C6)."""
        if term is not None and term < self._term:
            self._counters["refused_terms"] += 1
            return
        self._term = max(self._term, term or self._term)
        for notice in notices:
            choice = self._choices.get(notice.uid)
            if choice is None:
                self._counters["late_notices"] += 1
            elif notice.retriable:
                self._recovery.on_lost(choice, notice.kind, notice.message)
            else:
                self._fail(choice.request, notice.kind, notice.message)

    def claim(self, term: Term) -> tuple[RequestSpec, ...]:
        """A new term asks: every request that is not ended, to be continued after its accepted tokens (C6)."""
        self._term = max(self._term, term)
        return tuple(choice.stream.continuation() for choice in self._choices.values())

    def counters(self) -> Mapping[str, int]:
        """Cumulative counts of what the door did and saw."""
        return dict(self._counters)

    @property
    def num_open(self) -> int:
        """Choices that still wait for tokens."""
        return len(self._choices)

    @property
    def num_unanswered(self) -> int:
        """Requests whose answers are not complete yet."""
        return self._num_unanswered

    def start_draining(self) -> None:
        """Refuse new requests; open ones go on."""
        self._is_draining = True

    async def close(self) -> None:
        """Cancel every open request and wait until the endpoint was told. Idempotent."""
        self._is_draining = self._is_closed = True
        for request in {id(choice.request): choice.request for choice in self._choices.values()}.values():
            self._fail(request, ErrorKind.NO_WORKER, "this server is shutting down")
        if self._sweep_timer is not None:
            self._sweep_timer.cancel()
        for close in self.closing:
            close()
        await self._scheduler.drain()

    # -- life of a request -------------------------------------------------------------------------

    def _open(self, request: GenerationRequest) -> OpenRequest:
        opened = OpenRequest(request.api_id, request.num_choices, self._on_close)
        opened.trace = request.trace
        seed = self._seed_source() if request.seed is None else request.seed
        opened.choices = tuple(
            self._open_choice(opened, request, seed, index)
            for index in range(len(request.prompts) * request.num_choices)
        )
        for choice in opened.choices:
            if choice.is_open:
                self._choices[choice.uid] = choice
        self._num_unanswered += 1
        self._timelines.open(opened.timeline())
        self._counters["requests"] += 1
        self._keep_sweeping()
        opened.deadline_timer = asyncio.get_running_loop().call_later(
            self.settings.request_timeout_s, self._on_deadline, opened
        )
        return opened

    def _open_choice(self, opened: OpenRequest, request: GenerationRequest, seed: int, index: int) -> OpenChoice:
        prompt = request.prompts[index // request.num_choices]
        # To score a prompt is to compute it, and a computed prompt draws a token.
        is_scored_only = prompt.max_tokens == 0 and request.sampling.wants_prompt_logprobs
        spec = RequestSpec(
            uid=RequestUid(f"{request.api_id}/{index}"),
            door=self._door,
            prompt_token_ids=prompt.token_ids,
            sampling=replace(request.sampling, seed=seed, choice=index % request.num_choices),
            stop=replace(request.stop, max_tokens=1 if is_scored_only else prompt.max_tokens),
            priority=request.priority,
            group=self._group(request, index),
        )
        text = OutputText(
            self.tokenizer.token_bytes,
            spec.stop.stop_strings,
            includes_stop=request.includes_stop_text,
            min_tokens=spec.stop.min_tokens,
        )
        eos_token_ids = frozenset(self.settings.eos_token_ids)
        stream = ChoiceStream(spec, index, text, eos_token_ids, keeps_output=not is_scored_only)
        timeline = ChoiceTimeline(spec.uid, index, len(prompt.token_ids), self._clock())
        choice = OpenChoice(opened, stream, timeline)
        if stream.is_finished:
            self._end_timeline(choice, StreamState.FINISHED)
        return choice

    @staticmethod
    def _group(request: GenerationRequest, index: int) -> str:
        """Choices of one prompt; none where each computes the prompt alone, to score it."""
        if request.num_choices == 1 or request.sampling.wants_prompt_logprobs:
            return ""
        return f"{request.api_id}/{index // request.num_choices}"

    def _receive(self, choice: OpenChoice, event: TokenEvent) -> None:
        stream = choice.stream
        num_known = len(stream.token_ids)
        arrival = stream.receive(event)
        if event.durations is not None:
            choice.timeline.on_durations(event.attempt_id, event.durations, self._clock())
        if arrival is not Arrival.ACCEPTED:
            self._on_unaccepted(choice, event, arrival)
            return
        self._note_tokens(choice, num_known, event.attempt_id)
        if not stream.has_gap:
            choice.stop_gap_timer()
        if stream.is_finished:
            self._end_choice(choice, StreamState.FINISHED)
            if not stream.is_confirmed_end:
                # Some attempt does not know that it is over.
                self._scheduler.cancel([choice.uid])
            self._forget_when_ended(choice.request)
        choice.request.wake()

    def _note_tokens(self, choice: OpenChoice, num_known: int, attempt_id: AttemptId) -> None:
        now_s, timeline, num_tokens = self._clock(), choice.timeline, len(choice.stream.token_ids)
        last_at_s = timeline.last_token_at_s
        choice.heard_at_s = now_s
        if num_tokens == num_known:
            return  # it brought the prompt's logprobs, and is itself unwanted
        timeline.on_tokens(num_tokens, now_s)
        timeline.on_attempt_token(attempt_id, now_s)
        self.metrics.on_tokens(num_tokens - num_known, None if last_at_s is None else now_s - last_at_s)
        if last_at_s is None:
            self.metrics.on_first_token(timeline)

    def _on_unaccepted(self, choice: OpenChoice, event: TokenEvent, arrival: Arrival) -> None:
        self._counters[f"{arrival.name.lower()}_tokens"] += 1
        if arrival is Arrival.HELD:
            expected = len(choice.stream.token_ids)
            _log.info("request %s: token %d came before token %d", choice.uid, event.position, expected)
            self._recovery.watch_gap(choice)
        elif arrival is Arrival.DIVERGED:
            _log.error(
                "request %s: attempt %s drew token %d at position %d, where %d was accepted before",
                choice.uid, event.attempt_id, event.token_id, event.position, choice.stream.token_ids[event.position],
            )  # fmt: skip

    def _keep_sweeping(self) -> None:
        """Look for silent choices now and then, while there are any at all."""
        if self._sweep_timer is None and self._choices:
            period_s = self.settings.silence_s / _SWEEPS_PER_SILENCE
            self._sweep_timer = asyncio.get_running_loop().call_later(period_s, self._sweep)

    def _sweep(self) -> None:
        self._sweep_timer = None
        self._recovery.refresh(list(self._choices.values()))
        self._keep_sweeping()

    def _on_deadline(self, opened: OpenRequest) -> None:
        if any(choice.is_open for choice in opened.choices):
            self._counters["deadlines"] += 1
            limit_s = self.settings.request_timeout_s
            self._fail(opened, ErrorKind.DEADLINE, f"request {opened.api_id} was not finished in {limit_s} s")

    def _on_close(self, opened: OpenRequest) -> None:
        """Nobody reads it any more."""
        self._num_unanswered -= 1
        unwanted = [choice for choice in opened.choices if choice.is_open]
        for choice in unwanted:
            self._end_choice(choice, StreamState.CANCELLED)
        if unwanted:
            self._counters["cancelled_requests"] += 1
            self._scheduler.cancel([choice.uid for choice in unwanted])
        self._forget_when_ended(opened)

    def _fail(self, opened: OpenRequest, kind: ErrorKind, message: str) -> None:
        """One choice cannot go on, so the request as a whole cannot."""
        if opened.failure is not None:
            return
        opened.failure = RequestFailedError(kind, message)
        self._counters[f"failed_requests_{kind}"] += 1
        unfinished = [choice for choice in opened.choices if choice.is_open]
        for choice in unfinished:
            choice.timeline.error = message
            self._end_choice(choice, StreamState.FAILED)
        if unfinished:
            self._scheduler.cancel([choice.uid for choice in unfinished])
        self._forget_when_ended(opened)
        opened.wake()

    def _end_choice(self, choice: OpenChoice, state: StreamState) -> None:
        choice.is_open = False
        choice.stop_gap_timer()
        self._choices.pop(choice.uid, None)
        self._end_timeline(choice, state)

    def _end_timeline(self, choice: OpenChoice, state: StreamState) -> None:
        choice.timeline.finish_reason = choice.stream.finish_reason
        choice.timeline.on_end(state, self._clock())
        self.metrics.on_end(choice.timeline)

    def _forget_when_ended(self, opened: OpenRequest) -> None:
        if not any(choice.is_open for choice in opened.choices):
            ended = self._timelines.close(opened.api_id)
            if ended is not None:
                self.trace_sink(ended)
            if opened.deadline_timer is not None:
                opened.deadline_timer.cancel()


def _keep_no_trace(_: RequestTimeline) -> None:
    """Nobody wants it."""
