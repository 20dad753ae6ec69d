"""What a door asks for: `RequestSpec`, immutable for the life of a request, resubmissions included (C9)."""

from dataclasses import dataclass
from enum import StrEnum
from typing import NewType

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
class SamplingParams:
    """How a token is drawn (E2).

    Attributes:
        temperature: 0 is greedy.
        top_k: keep the k best; 0 keeps all.
        top_p: keep the smallest set of tokens whose probability reaches it; 1 keeps all.
        min_p: drop tokens below this share of the best one's probability; 0 drops none.
        seed: key of the noise; drawn by the door when the client gave none, then kept for ever.
        choice: index of the choice; part of the noise's key, so that n choices differ.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    choice: int = 0


@dataclass(frozen=True, slots=True)
class StopParams:
    """When a stream ends.

    Attributes:
        max_tokens: generated tokens in all, those of earlier attempts included.
        stop_strings: texts that end it; matched by the worker that samples (C9).
        stop_token_ids: tokens that end it, beside the model's end-of-sequence tokens.
        ignore_eos: the model's end-of-sequence tokens do not end it.
    """

    max_tokens: int
    stop_strings: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


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
        reuse_scope: KV blocks are shared only within one scope.
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
