"""What the HTTP layer asks the frontend for, in values that know nothing of HTTP.

DoorError
├── InvalidRequestError   the client's mistake; names the parameter
└── RequestFailedError    the request could not be served; carries the scheduler's ErrorKind
"""

from dataclasses import dataclass

from scheduler.messages import ErrorKind
from scheduler.spec import SamplingParams, StopParams
from serving.trace_context import TraceContext


class DoorError(Exception):
    """Root of what a door tells its client."""


class InvalidRequestError(DoorError):
    """A value that cannot be accepted.

    Attributes:
        param: name of the parameter, as the client wrote it.
        code: a machine-readable reason where clients know one.
    """

    def __init__(self, message: str, param: str | None, code: str | None = None) -> None:
        """Args: see the class."""
        super().__init__(message)
        self.param = param
        self.code = code


class RequestFailedError(DoorError):
    """An accepted request ended by a fault, or was refused by the cluster."""

    def __init__(self, kind: ErrorKind, message: str) -> None:
        """Args.

        kind: what happened.
        message: for the client.
        """
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True, slots=True)
class DoorSettings:
    """Limits of the model and the cluster, and the door's own patience.

    Attributes:
        model_name: the name in the API; a label of every metric.
        context_length: prompt and output tokens of one sequence, as the model allows.
        vocab_size: token ids are below it.
        eos_token_ids: the model's own; the same that the workers use.
        max_request_tokens: prompt and output tokens that some worker's pools can hold; an omitted
            max_tokens never asks for more.
        max_resubmissions: of one choice, in a row, whose attempts brought less than two tokens each.
        resubmit_delay_s: wait between tries to resubmit; doubles each time. After an attempt that brought
            tokens, the first try is immediate.
        max_resubmit_delay_s: it grows no longer than this.
        resubmit_patience_s: how long one resubmission may be refused for want of room or of a worker.
        silence_s: a choice without news for so long is submitted again.
        gap_deadline_s: how long a token may overtake an earlier one before the choice is resubmitted.
        submit_timeout_s: the central scheduler must answer within it.
        restart_patience_s: how long a new request waits for a central scheduler that cannot be reached or does not
            answer, since it is being restarted; 0 fails it at once.
        health_timeout_s: the same for /health and /cluster/state.
        request_timeout_s: from submission to the end, whatever happens elsewhere (I8).
        kept_timelines: finished requests that are remembered.
    """

    model_name: str
    context_length: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_request_tokens: int
    max_resubmissions: int = 5
    resubmit_delay_s: float = 0.25
    max_resubmit_delay_s: float = 2.0
    resubmit_patience_s: float = 30.0
    silence_s: float = 30.0
    gap_deadline_s: float = 2.0
    submit_timeout_s: float = 10.0
    restart_patience_s: float = 0.0
    health_timeout_s: float = 2.0
    request_timeout_s: float = 630.0
    kept_timelines: int = 2048

    @property
    def longest_sequence(self) -> int:
        """Tokens of the longest sequence that can be served."""
        return min(self.context_length, self.max_request_tokens)


@dataclass(frozen=True, slots=True)
class PromptPart:
    """One prompt of a request. `max_tokens` is 0 when only the prompt itself is asked for."""

    token_ids: tuple[int, ...]
    max_tokens: int


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One API request: every prompt gets `num_choices` streams.

    Attributes:
        api_id: the id in the answer; unique.
        prompts: at least one.
        num_choices: streams of a prompt.
        sampling: `seed` and `choice` in it are ignored.
        seed: the client's, or None: the door draws one.
        stop: `max_tokens` in it is ignored.
            A prompt of 0 `max_tokens` whose logprobs are wanted is computed, and what it draws is dropped.
        includes_stop_text: the stop string stays part of the text.
        priority: higher first.
        trace: the one it belongs to.
    """

    api_id: str
    prompts: tuple[PromptPart, ...]
    num_choices: int
    sampling: SamplingParams
    seed: int | None
    stop: StopParams
    includes_stop_text: bool = False
    priority: int = 0
    trace: TraceContext | None = None


def prompt_too_long(num_tokens: str, settings: DoorSettings) -> InvalidRequestError:
    """The error for a prompt that leaves no room in the context; `num_tokens` may be a wording."""
    msg = (
        f"This model's maximum context length is {settings.context_length} tokens. However, your prompt has "
        f"{num_tokens} tokens, which leaves no room for the completion. Please reduce the length of the prompt."
    )
    return InvalidRequestError(msg, "prompt", "context_length_exceeded")


def fit_max_tokens(num_prompt_tokens: int, requested: int | None, default: int | None, settings: DoorSettings) -> int:
    """The number of tokens to generate at most.

    Args:
        num_prompt_tokens: length of the prompt.
        requested: the client's wish.
        default: used where the client has none; None means the rest of the context. Shortened to what fits.
        settings: the limits.

    Raises:
        InvalidRequestError: prompt and output cannot fit the context.
    """
    limit = settings.context_length
    if num_prompt_tokens >= limit:
        raise prompt_too_long(str(num_prompt_tokens), settings)
    if requested is not None:
        if num_prompt_tokens + requested > limit:
            msg = (
                f"This model's maximum context length is {limit} tokens. However, you requested "
                f"{num_prompt_tokens + requested} tokens ({num_prompt_tokens} in the prompt, {requested} in the "
                "completion). Please reduce the length of the prompt or the completion."
            )
            raise InvalidRequestError(msg, "max_tokens", "context_length_exceeded")
        return requested
    # At least 1: a prompt that leaves no room in any worker is refused by the central scheduler by name.
    room = max(1, settings.longest_sequence - num_prompt_tokens)
    return room if default is None else min(default, room)
