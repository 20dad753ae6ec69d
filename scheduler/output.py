"""What one scheduling pass decided, and what its step produced: values between scheduler and loop."""

from dataclasses import dataclass

from manager import PageLease
from scheduler.request import Request
from scheduler.spec import FinishReason

OLDER_REQUEST_WAITS = "older_request_waits"
"""The reason of a `Deferral` that follows from another request, not from a limit."""


@dataclass(frozen=True, slots=True)
class ContextChunk:
    """Positions [start, start + num_tokens) of one request; its token is drawn when `is_last`."""

    request: Request
    start: int
    num_tokens: int
    is_last: bool


@dataclass(frozen=True, slots=True)
class Deferral:
    """Why an offer was not taken in this pass.

    Attributes:
        reason: a `RefusalReason` of the manager, or one of the scheduler's own: `batch_full`,
            `growth_reserve`, `transfer_window`, `older_request_waits`, `worst_case_exceeds_pool`.
        needed: units of that limit that it needed.
        available: units that were there.
    """

    reason: str
    needed: int = 0
    available: int = 0


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One committed plan.

    Attributes:
        iteration: number of the pass, from 1.
        contexts: chunks to compute; a re-prefilled (recompute-paused) request is among them.
        generations: requests that decode; input is their last known token, and their drafts after it.
        draft_lengths: drafts of each generation that have a place and rows in this step, aligned with
            `generations`; may be fewer than it wanted. Empty means none has any.
        reserved: offers that became reservations in this pass; the loop starts their transfers.
        deferred: offers that could not be taken, with the reason; the worker holds nothing of them.
        failed: requests that can never run here, with the reason; already released.
        sent_away: decodes that lost their pages here and are too long to compute again here (S3); released.
            Report them as failed and retriable: their doors submit them again with all tokens.
        pushed_out: requests that lost their pages in this pass and stay here.
        num_suspended: caches suspended in this pass.
        num_recomputed: caches paused for recompute in this pass.
        num_resumed: caches resumed in this pass.
        deadlock: set when requests wait, nothing could run and nothing in flight will release pages
            (S5); the text has the numbers. Cannot happen unless pages are held outside the scheduler.
    """

    iteration: int
    contexts: tuple[ContextChunk, ...] = ()
    generations: tuple[Request, ...] = ()
    draft_lengths: tuple[int, ...] = ()
    reserved: tuple[Request, ...] = ()
    deferred: tuple[tuple[Request, Deferral], ...] = ()
    failed: tuple[tuple[Request, str], ...] = ()
    sent_away: tuple[Request, ...] = ()
    pushed_out: tuple[Request, ...] = ()
    num_suspended: int = 0
    num_recomputed: int = 0
    num_resumed: int = 0
    deadlock: str | None = None

    @property
    def has_step(self) -> bool:
        """Whether the engine has anything to compute."""
        return bool(self.contexts or self.generations)

    @property
    def num_rows(self) -> int:
        """Tokens that the step computes."""
        return sum(chunk.num_tokens for chunk in self.contexts) + len(self.generations) + sum(self.draft_lengths)


@dataclass(frozen=True, slots=True)
class DrawnToken:
    """What a step drew for one request.

    Attributes:
        token_id: the token drawn after everything accepted.
        finish_reason: set when `token_id` is the request's last.
        accepted_token_ids: drafts that equal what was drawn at their positions, before `token_id`.
        draft_lag: 1 when the draft's layers have not computed the last position of the step yet, else 0 (M4).
    """

    token_id: int
    finish_reason: FinishReason | None = None
    accepted_token_ids: tuple[int, ...] = ()
    draft_lag: int = 0


@dataclass(frozen=True, slots=True)
class CompletedStep:
    """What completing a step changed.

    Attributes:
        tokens: (request, position, token) of every new token, in batch order; an accepted draft is a
            token like any other.
        leases: contexts that finished on a context worker and are now leased for a reader.
        shared: contexts that travel with another's ticket, each with the one that is leased; already released.
        finished: requests that ended in this step; already released.
    """

    tokens: tuple[tuple[Request, int, DrawnToken], ...] = ()
    leases: tuple[tuple[Request, PageLease], ...] = ()
    shared: tuple[tuple[Request, Request], ...] = ()
    finished: tuple[Request, ...] = ()


@dataclass(frozen=True, slots=True)
class AbandonedStep:
    """What abandoning a failed step changed (V22): history is where it was.

    Attributes:
        retried: requests that will be scheduled again.
        failed: requests that reached `max_step_retries`; already released.
    """

    retried: tuple[Request, ...] = ()
    failed: tuple[Request, ...] = ()
