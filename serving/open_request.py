"""`OpenRequest`: one API request that the door has accepted, as its HTTP handler sees it.

The handler reads merged deltas; the frontend writes tokens into the choices and wakes it. Deltas are
joined while the handler is busy (a slow client), so memory is bounded by the tokens themselves.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass

from scheduler.spec import RequestUid
from serving.generation_request import RequestFailedError
from serving.stream import ChoiceDelta, ChoiceStream
from serving.timeline import ChoiceTimeline, RequestTimeline
from serving.trace_context import TraceContext


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one API request. A prompt is counted once, however many choices it has."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


class OpenChoice:
    """One choice, with what the frontend needs to keep it going.

    Attributes:
        is_open: its tokens are still wanted.
        num_resubmissions: attempts after the first.
        num_fruitless: lost attempts in a row that brought less than two tokens each.
        num_submitted_tokens: of the stream when it was last submitted.
        is_being_resubmitted: a resubmission is on its way; a repeated notice changes nothing.
        gap_timer: runs while a token is missing.
        heard_at_s: when it was submitted or last gained a token, on the door's clock.
    """

    __slots__ = (
        "gap_timer",
        "heard_at_s",
        "is_being_resubmitted",
        "is_open",
        "num_fruitless",
        "num_resubmissions",
        "num_submitted_tokens",
        "request",
        "stream",
        "timeline",
    )

    def __init__(self, request: "OpenRequest", stream: ChoiceStream, timeline: ChoiceTimeline) -> None:
        """Args: its parts."""
        self.request = request
        self.stream = stream
        self.timeline = timeline
        self.is_open = not stream.is_finished
        self.num_resubmissions = 0
        self.num_fruitless = 0
        self.num_submitted_tokens = 0
        self.is_being_resubmitted = False
        self.gap_timer: asyncio.TimerHandle | None = None
        self.heard_at_s = timeline.submitted_at_s

    @property
    def uid(self) -> RequestUid:
        """Its name everywhere."""
        return self.stream.spec.uid

    def has_ended(self) -> bool:
        """Whether its tokens are no longer wanted: asked again after waiting for something."""
        return not self.is_open

    def stop_gap_timer(self) -> None:
        """No token is missing any more, or none is wanted."""
        if self.gap_timer is not None:
            self.gap_timer.cancel()
            self.gap_timer = None


class OpenRequest:
    """One API request. Made by the frontend; `close` it in every case.

    Attributes:
        api_id: the id in the answer.
        choices: index = prompt index * n + k.
        failure: why it failed, if it did.
        trace: the one it belongs to; None when nobody asked for any.
    """

    def __init__(self, api_id: str, num_choices: int, on_close: Callable[["OpenRequest"], None]) -> None:
        """Args.

        api_id: the id in the answer.
        num_choices: choices of each prompt.
        on_close: called once, by the first `close`.
        """
        self.api_id = api_id
        self.choices: tuple[OpenChoice, ...] = ()
        self.failure: RequestFailedError | None = None
        self.trace: TraceContext | None = None
        self.deadline_timer: asyncio.TimerHandle | None = None
        self._num_choices = num_choices
        self._on_close = on_close
        self._is_closed = False
        self._news = asyncio.Event()

    def timeline(self) -> RequestTimeline:
        """Where its time went."""
        return RequestTimeline(self.api_id, tuple(choice.timeline for choice in self.choices), self.trace)

    @property
    def is_finished(self) -> bool:
        """Whether every choice has its last token."""
        return all(choice.stream.is_finished for choice in self.choices)

    def wake(self) -> None:
        """Something changed."""
        self._news.set()

    async def deltas(self) -> AsyncGenerator[ChoiceDelta, None]:
        """What the choices gain, as it comes, until every one is finished. One reader at a time.

        Raises:
            RequestFailedError: after the deltas that came before the fault.
        """
        while True:
            self._news.clear()
            for choice in self.choices:
                if (delta := choice.stream.take_delta()) is not None:
                    yield delta
            if self._news.is_set():
                # Something came while the reader was busy with a delta.
                continue
            if self.is_finished:
                return
            if self.failure is not None:
                raise self.failure
            await self._news.wait()

    def usage(self) -> Usage:
        """Tokens so far."""
        prompts = [self.choices[i : i + self._num_choices] for i in range(0, len(self.choices), self._num_choices)]
        return Usage(
            prompt_tokens=sum(len(choices[0].stream.spec.prompt_token_ids) for choices in prompts),
            completion_tokens=sum(len(choice.stream.token_ids) for choice in self.choices),
            # The prompt is counted once, so what its choices found because of one another is no saving.
            cached_tokens=sum(min(choice.timeline.cached_tokens or 0 for choice in choices) for choices in prompts),
        )

    def close(self) -> None:
        """The answer is complete, or nobody wants it any more: what still runs is cancelled. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self._on_close(self)
