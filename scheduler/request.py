"""`Request`: one attempt on one worker, with its tokens, its state and its timings.

Holds no pages and no positions of the cache: what is computed is asked of the manager
(`history_length`), so that the two cannot disagree. Satisfies `manager.CacheRequest`.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from manager import AdapterId, RequestId, ReuseScope
from scheduler.spec import AttemptId, RequestSpec
from scheduler.states import TERMINAL_ATTEMPT_STATES, AttemptEvent, AttemptState, advance_attempt

_log = logging.getLogger("pdserve.transition")


@dataclass(frozen=True, slots=True)
class StateChange:
    """One entry of a request's history; `at_s` is the caller's clock."""

    event: AttemptEvent
    state: AttemptState
    at_s: float


class Request:
    """One attempt on one worker.

    Attributes:
        spec: what the door asked for.
        attempt_id: this try.
        arrival: order of arrival on this worker; smaller is older.
        source: the choice of the same prompt whose prefill it shares; its cache can be forked while it is here.
        first_token_id: drawn before this attempt came here, and added when its source is activated.
        failed_steps: steps that raised while it was in them (V22).
        num_reused_tokens: positions found in the cache by its first prefix claim here (cached_tokens).
        history: every event but TOKEN, oldest first; tokens are in `token_ids`.
        request_id: the manager's key: this attempt.
        token_ids: prompt, accepted and generated tokens; grows at its end.
        prompt_length: tokens that this attempt started with: the prompt, and accepted tokens of earlier attempts.
    """

    __slots__ = (
        "_token_ids",
        "arrival",
        "attempt_id",
        "failed_steps",
        "first_token_id",
        "history",
        "num_draft_tokens",
        "num_reused_tokens",
        "prompt_length",
        "request_id",
        "source",
        "spec",
        "state",
        "token_ids",
    )

    def __init__(
        self, spec: RequestSpec, attempt_id: AttemptId, state: AttemptState, *, arrival: int, now_s: float
    ) -> None:
        """Start in `state`: CONTEXT_INIT, or DISAGG_GENERATION_INIT for an offer."""
        self.spec = spec
        self.attempt_id = attempt_id
        self.arrival = arrival
        self.state = state
        self.source: Request | None = None
        self.first_token_id: int | None = None
        self.failed_steps = 0
        self.num_draft_tokens = 0
        self.num_reused_tokens: int | None = None
        self.history: list[StateChange] = []
        # Attributes, not properties: a pass reads them several times per request.
        self.request_id = RequestId(attempt_id)
        self._token_ids = [*spec.prompt_token_ids, *spec.accepted_token_ids]
        self.token_ids: Sequence[int] = self._token_ids
        self.prompt_length = len(self._token_ids)

    # -- manager.CacheRequest ----------------------------------------------------------------------

    @property
    def reuse_scope(self) -> ReuseScope:
        """Blocks are shared only inside it.

        Logprobs of a prompt need every position's logits, and a block found in the cache has none: such an
        attempt computes its whole prompt, alone.
        """
        if self.wants_prompt_logprobs:
            return ReuseScope(self.attempt_id)
        return ReuseScope(self.spec.reuse_scope)

    @property
    def adapter_id(self) -> AdapterId | None:
        """The request's own."""
        return self.spec.adapter_id

    @property
    def encoder_token_ids(self) -> Sequence[int]:
        """The request's own."""
        return self.spec.encoder_token_ids

    def may_share_blocks_with(self, other: "Request") -> bool:
        """Whether equal tokens have equal keys and values: these depend on the adapter and the encoder's input, too."""
        mine, theirs = self.spec, other.spec
        return (
            self.reuse_scope == other.reuse_scope
            and mine.adapter_id == theirs.adapter_id
            and mine.encoder_token_ids == theirs.encoder_token_ids
        )

    @property
    def priority(self) -> int:
        """The request's own."""
        return self.spec.priority

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether this attempt reports its prompt's logprobs; a resumed one's client has them already."""
        return self.spec.sampling.wants_prompt_logprobs and not self.spec.accepted_token_ids

    # -- tokens and state --------------------------------------------------------------------------

    @property
    def num_generated(self) -> int:
        """Generated tokens of the whole request, earlier attempts included: the next token's position."""
        return len(self._token_ids) - len(self.spec.prompt_token_ids)

    def append_token(self, token_id: int) -> int:
        """Add a drawn token; returns its position among the generated ones."""
        position = self.num_generated
        self._token_ids.append(token_id)
        return position

    def take_back_tokens(self, count: int) -> None:
        """Forget the last `count` tokens: the step that brought them could not be completed."""
        del self._token_ids[len(self._token_ids) - count :]

    @property
    def is_terminal(self) -> bool:
        """Whether the attempt has ended on this worker."""
        return self.state in TERMINAL_ATTEMPT_STATES

    def on_event(self, event: AttemptEvent, now_s: float) -> None:
        """Move by the table. Raises IllegalTransition and changes nothing where the table has no entry."""
        before, self.state = self.state, advance_attempt(self.state, event)
        if event is AttemptEvent.TOKEN:
            return
        self.history.append(StateChange(event, self.state, now_s))
        if _log.isEnabledFor(logging.DEBUG):
            names = {"uid": self.spec.uid, "attempt": self.attempt_id, "event": event.value}
            _log.debug("%s: %s -> %s", event, before, self.state, extra=names | {"before": before, "after": self.state})

    def __repr__(self) -> str:
        """Short, for logs and assertion messages."""
        return f"Request({self.attempt_id} {self.spec.uid} {self.state} tokens={len(self._token_ids)})"


@dataclass(frozen=True, slots=True)
class WithDrafts:
    """A request as the manager should see it for one call: with another draft length.

    The request keeps its own wish, so that a refusal leaves no draft length behind (V3).
    """

    request: Request
    num_draft_tokens: int

    @property
    def request_id(self) -> RequestId:
        """The request's."""
        return self.request.request_id

    @property
    def token_ids(self) -> Sequence[int]:
        """The request's."""
        return self.request.token_ids

    @property
    def prompt_length(self) -> int:
        """The request's."""
        return self.request.prompt_length

    @property
    def reuse_scope(self) -> ReuseScope:
        """The request's."""
        return self.request.reuse_scope

    @property
    def adapter_id(self) -> AdapterId | None:
        """The request's."""
        return self.request.adapter_id

    @property
    def encoder_token_ids(self) -> Sequence[int]:
        """The request's."""
        return self.request.encoder_token_ids

    @property
    def priority(self) -> int:
        """The request's."""
        return self.request.priority
