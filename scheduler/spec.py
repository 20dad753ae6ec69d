"""What a door asks for: `RequestSpec`, immutable for the life of a request, resubmissions included (C9)."""

from dataclasses import dataclass
from enum import StrEnum
from typing import NewType

from manager import AdapterId

RequestUid = NewType("RequestUid", str)
"""The door's name for one choice of one API request; the same over every attempt."""
AttemptId = NewType("AttemptId", str)
"""`term.counter`: one try of a request; unique for ever (C6, C8)."""
DoorName = NewType("DoorName", str)
Term = NewType("Term", int)
"""One life of the central scheduler."""


class FinishReason(StrEnum):
    """Why a stream ended well. A fault or an abort is never one of these."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """How likely the model held one token, by its unchanged logits (temperature 1, nothing filtered or added).

    Attributes:
        logprob: natural logarithm of the token's probability.
        top: (token id, logprob) of the best tokens, best first, lower id first on ties.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Penalties:
    """What a token's earlier appearances cost it. Tokens of earlier attempts count as generated (C9).

    Attributes:
        presence: once for a token that was generated.
        frequency: for each time that a token was generated.
        repetition: divides the logit of a token of prompt or output (a negative one is multiplied); 1 is none.

    Raises:
        ValueError: a penalty could make a logit infinite, which would end its neighbours' step as well.
    """

    presence: float = 0.0
    frequency: float = 0.0
    repetition: float = 1.0

    def __post_init__(self) -> None:
        """Refuse bad values."""
        if not (abs(self.presence) <= 100 and abs(self.frequency) <= 100 and 1e-3 <= self.repetition <= 1e3):
            msg = f"{self} is out of range"
            raise ValueError(msg)

    @property
    def is_neutral(self) -> bool:
        """Whether they change nothing."""
        return self.presence == self.frequency == 0.0 and self.repetition == 1.0


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a token is drawn (E2).

    Attributes:
        temperature: 0 is greedy.
        top_k: keep the k best; 0 keeps all.
        top_p: keep the smallest set of tokens whose probability reaches it; 1 keeps all.
        min_p: drop tokens below this share of the best one's probability; 0 drops none.
        penalties: applied to the logits first.
        logit_bias: (token id, what is added to its logit), each token once.
        grammar: what the generated tokens must follow, in the notation of `serving.grammar`; empty is free.
        seed: key of the noise; drawn by the door when the client gave none, then kept for ever.
        choice: index of the choice; part of the noise's key, so that n choices differ.
        num_logprobs: best tokens to report beside each drawn one; None reports no logprobs at all.
        wants_prompt_logprobs: the prompt's own tokens are reported as well, with the first drawn token.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    choice: int = 0
    num_logprobs: int | None = None
    wants_prompt_logprobs: bool = False
    penalties: Penalties = Penalties()
    logit_bias: tuple[tuple[int, float], ...] = ()
    grammar: str = ""

    @property
    def has_plain_logits(self) -> bool:
        """Whether tokens are drawn from the model's own logits."""
        return self.penalties.is_neutral and not self.logit_bias and not self.grammar


@dataclass(frozen=True, slots=True)
class StopParams:
    """When a stream ends.

    Attributes:
        max_tokens: generated tokens in all, those of earlier attempts included.
        stop_strings: texts that end it; matched by the worker that samples (C9).
        stop_token_ids: tokens that end it, beside the model's end-of-sequence tokens.
        ignore_eos: the model's end-of-sequence tokens do not end it.
        min_tokens: generated tokens before anything but `max_tokens` may end it; tokens that would are not
            drawn, and stop strings that they complete do not count.
    """

    max_tokens: int
    stop_strings: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """One choice of one API request.

    Attributes:
        uid: the door's name for it.
        door: where its token events go.
        prompt_token_ids: at least one token.
        accepted_token_ids: generated tokens that the door already has (a resubmission, C9); the next
            token's position is their number. They are computed like prompt, and never counted as prompt.
        sampling: how tokens are drawn.
        stop: when it ends.
        priority: higher first.
        is_continuation: the door submits it again; it was admitted before.
        group: choices of one prompt, submitted together, have the same: they may share its prefill.
        reuse_scope: KV blocks are shared only within one scope.
        adapter_id: the LoRA adapter that it runs with.
        encoder_token_ids: what the encoder reads, as ids that stand for it; empty without an encoder.
    """

    uid: RequestUid
    door: DoorName
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    stop: StopParams
    accepted_token_ids: tuple[int, ...] = ()
    priority: int = 0
    reuse_scope: str = ""
    is_continuation: bool = False
    adapter_id: AdapterId | None = None
    encoder_token_ids: tuple[int, ...] = ()
    group: str = ""


@dataclass(frozen=True, slots=True)
class Follower:
    """A further choice of a prompt, on its way with the choice whose prefill it shares.

    `first_token_id`: drawn with that one's; None before.
    """

    attempt_id: AttemptId
    spec: RequestSpec
    first_token_id: int | None = None
