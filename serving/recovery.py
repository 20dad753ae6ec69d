"""`AttemptRecovery`: gets a stream going again whose attempt was lost, or whose tokens stay away (C7, C9).

Three signs, one answer: the request is submitted again with the tokens that were accepted, the same uid
and the same seed.

    a retriable notice    the attempt is over; submit at once, or after a delay where the last one brought nothing
    a lasting gap         a token was lost on its way; end the attempt first, then as above
    silence               anything may have been lost, this door's own submission included. To submit again
                          changes nothing while the request is queued or runs, so it is safe at any time

Deaths of workers are not the request's fault, and a long stream may meet many. A request that kills its workers is
told from one that is unlucky by progress: it kills each at the same place. So only losses in a row that brought
less than two tokens count against the limit.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable

from scheduler.messages import DoorNotice, ErrorKind
from serving.endpoint import EndpointUnavailableError
from serving.generation_request import DoorSettings
from serving.open_request import OpenChoice, OpenRequest
from serving.scheduler_client import SchedulerClient

_log = logging.getLogger(__name__)

_PASSING = frozenset({ErrorKind.QUEUE_FULL, ErrorKind.NO_WORKER})
"""Refusals that are worth waiting for: the request was accepted once already."""
_FRUITFUL_TOKENS = 2
"""The first comes from the prompt, the second from a decode: with both, both halves have worked."""


class AttemptRecovery:
    """Recovery of one door's streams. Lives on the door's event loop."""

    def __init__(
        self,
        scheduler: SchedulerClient,
        settings: DoorSettings,
        counters: Counter[str],
        *,
        clock: Callable[[], float],
        fail: Callable[[OpenRequest, ErrorKind, str], None],
    ) -> None:
        """Args.

        scheduler: the central scheduler.
        settings: how often and how long to try.
        counters: the door's; `resubmissions`, `lasting_gaps` and `refreshes` are counted here.
        clock: monotonic seconds.
        fail: ends a request whose stream cannot go on.
        """
        self._scheduler = scheduler
        self._settings = settings
        self._counters = counters
        self._clock = clock
        self._fail = fail

    def on_lost(self, choice: OpenChoice, kind: ErrorKind, message: str) -> None:
        """The choice's attempt has ended early. A notice that comes twice changes nothing."""
        if choice.is_being_resubmitted:
            return
        is_fruitful = len(choice.stream.token_ids) - choice.num_submitted_tokens >= _FRUITFUL_TOKENS
        choice.num_fruitless = 0 if is_fruitful else choice.num_fruitless + 1
        if choice.num_fruitless > self._settings.max_resubmissions:
            limit = self._settings.max_resubmissions
            self._fail(choice.request, kind, f"{message} (after {limit} resubmissions without progress)")
            return
        choice.num_submitted_tokens = len(choice.stream.token_ids)
        choice.num_resubmissions += 1
        choice.timeline.num_resubmissions = choice.num_resubmissions
        choice.timeline.on_lost(self._clock())
        choice.is_being_resubmitted = True
        choice.stop_gap_timer()
        choice.stream.give_up_attempts()
        self._counters["resubmissions"] += 1
        _log.warning("request %s lost its attempt (%s: %s); resubmitting", choice.uid, kind, message)
        self._scheduler.spawn(self._resubmit(choice))

    def watch_gap(self, choice: OpenChoice) -> None:
        """A token came before an earlier one. Soon it is no longer a matter of order. May be called again."""
        if choice.gap_timer is None:
            loop = asyncio.get_running_loop()
            choice.gap_timer = loop.call_later(self._settings.gap_deadline_s, self._on_lasting_gap, choice)

    def refresh(self, choices: Iterable[OpenChoice]) -> None:
        """Submit again what has been silent for too long. Called now and then with all open choices."""
        now_s = self._clock()
        silent = [
            choice
            for choice in choices
            if not choice.is_being_resubmitted and now_s - choice.heard_at_s >= self._settings.silence_s
        ]
        for choice in silent:
            choice.heard_at_s = now_s
            # If it runs on, its end must be told to whatever this submission starts.
            choice.stream.doubt_attempts()
        if silent:
            self._counters["refreshes"] += len(silent)
            _log.info("submitting %d silent requests again", len(silent))
            self._scheduler.spawn(self._resubmit_silent(silent))

    def _on_lasting_gap(self, choice: OpenChoice) -> None:
        choice.gap_timer = None
        if not choice.is_open or not choice.stream.has_gap:
            return
        expected = len(choice.stream.token_ids)
        _log.warning("request %s: token %d did not come; asking again", choice.uid, expected)
        self._counters["lasting_gaps"] += 1
        self._scheduler.cancel([choice.uid])
        self.on_lost(choice, ErrorKind.INTERNAL, f"token {expected} of request {choice.uid} was lost")

    async def _resubmit(self, choice: OpenChoice) -> None:
        """Until it is accepted, fails for good, or patience ends."""
        give_up_at_s = self._clock() + self._settings.resubmit_patience_s
        delay_s = self._settings.resubmit_delay_s if choice.num_fruitless > 1 else 0.0
        while True:
            await asyncio.sleep(delay_s)
            notice = await self._try_once(choice)
            if notice is None:
                return
            is_passing = notice.retriable or notice.kind in _PASSING
            if not is_passing or self._clock() >= give_up_at_s:
                self._fail(choice.request, notice.kind, notice.message)
                return
            delay_s = min(max(2 * delay_s, self._settings.resubmit_delay_s), self._settings.max_resubmit_delay_s)

    async def _try_once(self, choice: OpenChoice) -> DoorNotice | None:
        """Submit once; the refusal, or None when nothing is left to do."""
        if not choice.is_open:
            return None
        # A notice that comes from now on may be about the new attempt.
        choice.is_being_resubmitted = False
        try:
            # While nobody can be reached it is asked often and evenly: growing delays are for who refuses.
            refused = (await self._scheduler.submit_patiently([choice.stream.continuation()])).refused
        except EndpointUnavailableError as error:
            refused = (DoorNotice(choice.uid, ErrorKind.NO_WORKER, str(error), retriable=True),)
        except Exception:
            self._fail(choice.request, ErrorKind.INTERNAL, f"request {choice.uid} could not be resubmitted")
            raise
        if choice.has_ended():
            # While the scheduler was being asked.
            self._scheduler.cancel([choice.uid])
            return None
        if not refused:
            choice.timeline.on_resubmitted(self._clock())
            return None
        if choice.is_being_resubmitted:
            return None
        choice.is_being_resubmitted = True
        return refused[0]

    async def _resubmit_silent(self, choices: list[OpenChoice]) -> None:
        try:
            refused = (await self._scheduler.submit([choice.stream.continuation() for choice in choices])).refused
        except EndpointUnavailableError:
            # They are not lost; the next round tries again.
            return
        kinds = {notice.uid: notice for notice in refused}
        for choice in choices:
            if choice.has_ended():
                self._scheduler.cancel([choice.uid])
            elif (notice := kinds.get(choice.uid)) is not None:
                # Refused means that no attempt runs any more.
                self.on_lost(choice, notice.kind, notice.message)
