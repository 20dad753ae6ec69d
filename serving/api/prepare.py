"""From a request body to a `GenerationRequest`: the checks that need the model, and the defaults."""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from pydantic import ValidationError

from configs import ServerConfig
from scheduler.spec import Penalties, SamplingParams, StopParams
from serving.api.answers import AnswerFormat, ChatAnswers, CompletionAnswers, Envelope
from serving.api.bounds import refuse_floods
from serving.api.chat_form import ChatForm, chat_form
from serving.api.errors import ApiError, of_validation
from serving.api.logprobs import Echo, LogprobWording, make_echo
from serving.api.schema import ChatCompletionRequest, ChatMessage, CompletionRequest, GenerationFields, Prompt
from serving.api.unsupported import UnknownFieldLog, refuse_unsupported
from serving.chat_template import ChatTemplateError
from serving.generation_request import DoorSettings, GenerationRequest, PromptPart, fit_max_tokens, prompt_too_long
from serving.grammar import GrammarError
from serving.grammar_check import GrammarChecker
from serving.tokenizer import Tokenizer

_DEFAULT_COMPLETION_TOKENS = 16
_GREEDY_BELOW = 1e-6
"""Logits divided by less than this overflow float32; the limit of such a temperature is greedy."""
_THREAD_ABOVE_CHARACTERS = 2_048
"""Longer texts are tokenized beside the event loop: 16 KB took 14 ms, in which no stream got a token."""
_THREAD_ABOVE_MESSAGES = 64
"""The same for filling in the chat template: 5,000 messages took 70 ms."""

_CHAT_ONLY: Mapping[str, tuple[object, ...]] = {
    "top_logprobs": (None,),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "response_format": (None, {"type": "text"}),
}
"""Refused by the other endpoint, unless neutral."""


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """What to run, and how to word the answer.

    Attributes:
        num_wanted: choices of each prompt in the answer; the likeliest of those that run (`best_of`).
    """

    generation: GenerationRequest
    answers: AnswerFormat
    is_stream: bool
    has_usage: bool
    num_wanted: int


@dataclass(frozen=True, slots=True)
class _DrawnBy:
    """What only one endpoint's parameters say of a draw; see `SamplingParams`."""

    num_top: int | None
    of_prompt: bool = False
    grammar: str = ""


class RequestPreparer:
    """Checks and completes request bodies for one model."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        settings: DoorSettings,
        config: ServerConfig,
        model: str,
        *,
        wall_clock: Callable[[], float],
        id_source: Callable[[], str],
    ) -> None:
        """Args.

        tokenizer: the model's.
        settings: limits of model and cluster.
        config: limits of one HTTP request.
        model: the name that requests must give.
        wall_clock: Unix seconds, for `created`.
        id_source: a fresh unique string.
        """
        self._tokenizer = tokenizer
        self._settings = settings
        self._config = config
        self._model = model
        self._wall_clock = wall_clock
        self._id_source = id_source
        self._unknown_fields = UnknownFieldLog()
        self._grammars = GrammarChecker(tokenizer.document, settings.vocab_size, settings.eos_token_ids)
        self._grammar_turn = asyncio.Lock()
        self._logprobs = LogprobWording(tokenizer.token_bytes)

    def check_model(self, name: str) -> None:
        """Raise ApiError 404 for any model but the served one."""
        if name != self._model:
            msg = f"The model {name[:200]!r} does not exist. This server has {self._model!r}."
            raise ApiError(404, msg, param="model", code="model_not_found")

    def close(self) -> None:
        """End what was started to check requests; may be called twice."""
        self._grammars.close()

    async def completion(self, body: Mapping[str, object]) -> PreparedRequest:
        """POST /v1/completions.

        Raises:
            ApiError: a value cannot be accepted.
            InvalidRequestError: prompt and output do not fit the context.
        """
        refuse_floods(body, self._config.max_prompts, self._settings)
        refuse_unsupported(body, _CHAT_ONLY)
        try:
            fields = CompletionRequest.model_validate(body)
        except ValidationError as error:
            raise of_validation(error) from error
        self._check(fields)
        self._check_completion(fields)
        n = fields.n or 1
        num_drawn = fields.best_of or n
        parts = [await self._prompt_part(prompt, fields.max_tokens) for prompt in fields.prompt]
        wants_logprobs = fields.logprobs is not None
        echoes = [
            self._echo(prompt, part, has_offsets=wants_logprobs) if fields.echo else Echo()
            for prompt, part in zip(fields.prompt, parts, strict=True)
        ]
        # To find the likeliest choices, their logprobs are needed, asked for or not.
        num_top = 0 if fields.logprobs is None and num_drawn > n else fields.logprobs
        drawn_by = _DrawnBy(num_top, of_prompt=wants_logprobs and bool(fields.echo))
        generation = replace(self._generation("cmpl-", fields, parts, drawn_by), num_choices=num_drawn)
        answers = CompletionAnswers(
            self._envelope(generation, fields),
            list(chain.from_iterable([echo] * n for echo in echoes)),
            self._logprobs if wants_logprobs else None,
        )
        return self._prepared(generation, answers, fields)

    async def chat(self, body: Mapping[str, object]) -> PreparedRequest:
        """POST /v1/chat/completions. Raises as `completion`."""
        refuse_floods(body, self._config.max_prompts, self._settings)
        refuse_unsupported(body, {"echo": (None, False), "best_of": (None, 1)})
        try:
            fields = ChatCompletionRequest.model_validate(body)
        except ValidationError as error:
            raise of_validation(error) from error
        self._check(fields)
        form = chat_form(fields)
        if form.grammar:
            await self._check_grammar(form)
        try:
            tools = [tool.model_dump(exclude_none=True) for tool in form.tools]
            text = await self._render([_plain(message) for message in fields.messages], tools)
        except ChatTemplateError as error:
            raise ApiError(400, str(error), param="messages") from error
        token_ids = await self._encode(text, add_special_tokens=False)
        requested = fields.max_tokens if fields.max_completion_tokens is None else fields.max_completion_tokens
        max_tokens = fit_max_tokens(len(token_ids), requested, None, self._settings)
        if fields.top_logprobs and not fields.logprobs:
            raise ApiError(400, "top_logprobs is only allowed when logprobs is true", param="top_logprobs")
        drawn_by = _DrawnBy(fields.top_logprobs or 0 if fields.logprobs else None, grammar=form.grammar)
        parts = [PromptPart(tuple(token_ids), max_tokens)]
        generation = self._generation("chatcmpl-", fields, parts, drawn_by)
        answers = ChatAnswers(
            self._envelope(generation, fields), self._logprobs if fields.logprobs else None, form.tool_names
        )
        return self._prepared(generation, answers, fields)

    # -- checks ------------------------------------------------------------------------------------

    def _check(self, fields: GenerationFields) -> None:
        self.check_model(fields.model)
        self._unknown_fields.note(fields.unknown_fields)
        if fields.n is not None and fields.n > self._config.max_choices:
            raise ApiError(400, f"n={fields.n} is above the limit of {self._config.max_choices}", param="n")
        if fields.stream_options is not None and not fields.stream:
            raise ApiError(400, "stream_options is only allowed when stream is set", param="stream_options")
        self._check_vocabulary(fields.stop_token_ids or (), "stop_token_ids")
        self._check_vocabulary(tuple(fields.logit_bias), "logit_bias")

    async def _check_grammar(self, form: ChatForm) -> None:
        try:
            if self._grammars.knows(form.grammar):
                self._grammars.check(form.grammar)
                return
            # One at a time: whoever waits here holds none of the threads that long prompts are tokenized in.
            async with self._grammar_turn:
                await asyncio.to_thread(self._grammars.check, form.grammar)
        except GrammarError as error:
            raise ApiError(400, f"{form.param}: {error}", param=form.param) from error

    def _check_completion(self, fields: CompletionRequest) -> None:
        n, limit = fields.n or 1, self._config.max_choices
        if fields.best_of is not None:
            if not n <= fields.best_of <= limit:
                raise ApiError(400, f"best_of={fields.best_of} must be from n={n} to {limit}", param="best_of")
            if fields.stream and fields.best_of > n:
                raise ApiError(400, "best_of above n cannot be streamed", param="best_of")
        if fields.max_tokens == 0 and not fields.echo:
            raise ApiError(400, "max_tokens must be at least 1 unless echo is set", param="max_tokens")

    def _check_vocabulary(self, token_ids: Sequence[int], param: str) -> None:
        limit = self._settings.vocab_size
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < limit:
            wrong = next(token_id for token_id in token_ids if not 0 <= token_id < limit)
            msg = f"token id {wrong} in {param} is outside the vocabulary of {limit} tokens"
            raise ApiError(400, msg, param=param)

    # -- prompts -----------------------------------------------------------------------------------

    async def _prompt_part(self, prompt: Prompt, max_tokens: int | None) -> PromptPart:
        if isinstance(prompt, str):
            token_ids = await self._encode(prompt) if prompt else []
        else:
            token_ids = prompt
            self._check_vocabulary(token_ids, "prompt")
        if not token_ids:
            raise ApiError(400, "the prompt is empty", param="prompt")
        fitted = fit_max_tokens(len(token_ids), max_tokens, _DEFAULT_COMPLETION_TOKENS, self._settings)
        return PromptPart(tuple(token_ids), fitted)

    async def _render(self, messages: list[dict[str, object]], tools: list[dict[str, object]]) -> str:
        if len(messages) <= _THREAD_ABOVE_MESSAGES:
            return self._tokenizer.render_chat(messages, tools)
        return await asyncio.to_thread(self._tokenizer.render_chat, messages, tools)

    async def _encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        if len(text) <= _THREAD_ABOVE_CHARACTERS:
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        # Megabytes of text take seconds of a core, only to be refused.
        if (at_least := self._tokenizer.min_tokens(text)) >= self._settings.context_length:
            wording = f"at least {at_least}"
            raise prompt_too_long(wording, self._settings)
        return await asyncio.to_thread(self._tokenizer.encode, text, add_special_tokens=add_special_tokens)

    def _echo(self, prompt: Prompt, part: PromptPart, *, has_offsets: bool) -> Echo:
        text = prompt if isinstance(prompt, str) else self._tokenizer.decode_verbatim(prompt)
        return make_echo(self._tokenizer.token_bytes, text, part.token_ids) if has_offsets else Echo(text)

    # -- what to run -------------------------------------------------------------------------------

    def _generation(
        self, prefix: str, fields: GenerationFields, parts: Sequence[PromptPart], drawn_by: _DrawnBy
    ) -> GenerationRequest:
        fewest = min(part.max_tokens for part in parts)
        if fields.min_tokens and fields.min_tokens > fewest:
            msg = f"min_tokens={fields.min_tokens} is above max_tokens={fewest}"
            raise ApiError(400, msg, param="min_tokens")
        return GenerationRequest(
            api_id=prefix + self._id_source(),
            prompts=tuple(parts),
            num_choices=fields.n or 1,
            sampling=_sampling(fields, drawn_by, self._settings.vocab_size),
            seed=None if fields.seed is None else fields.seed % 2**63,
            stop=StopParams(
                max_tokens=0,
                stop_strings=tuple(fields.stop),
                stop_token_ids=tuple(fields.stop_token_ids or ()),
                ignore_eos=bool(fields.ignore_eos),
                min_tokens=fields.min_tokens or 0,
            ),
            includes_stop_text=bool(fields.include_stop_str_in_output),
            priority=fields.priority or 0,
        )

    def _envelope(self, generation: GenerationRequest, fields: GenerationFields) -> Envelope:
        return Envelope(generation.api_id, int(self._wall_clock()), self._model, _has_usage(fields))

    def _prepared(
        self, generation: GenerationRequest, answers: AnswerFormat, fields: GenerationFields
    ) -> PreparedRequest:
        return PreparedRequest(
            generation,
            answers,
            is_stream=bool(fields.stream),
            has_usage=_has_usage(fields),
            num_wanted=fields.n or 1,
        )


def _has_usage(fields: GenerationFields) -> bool:
    return bool(fields.stream and fields.stream_options and fields.stream_options.include_usage)


def _plain(message: ChatMessage) -> dict[str, object]:
    """A message as templates read it: arguments are values, not text."""
    plain: dict[str, object] = {
        "role": "system" if message.role == "developer" else message.role,
        "content": message.content,
    }
    if message.tool_calls:
        plain["tool_calls"] = [
            {
                "type": "function",
                "function": {"name": call.function.name, "arguments": json.loads(call.function.arguments)},
            }
            for call in message.tool_calls
        ]
    return plain


def _sampling(fields: GenerationFields, drawn_by: _DrawnBy, vocab_size: int) -> SamplingParams:
    temperature = 1.0 if fields.temperature is None else fields.temperature
    top_p = 1.0 if fields.top_p is None else fields.top_p
    top_k = fields.top_k or 0
    if not 0 < top_k < vocab_size:
        top_k = 0
    if top_p == 0:
        # The smallest set that reaches no probability at all is, by OpenAI's reading, the best token.
        top_k, top_p = 1, 1.0
    return SamplingParams(
        temperature=temperature if temperature >= _GREEDY_BELOW else 0.0,
        top_k=top_k,
        top_p=top_p,
        min_p=fields.min_p or 0.0,
        num_logprobs=drawn_by.num_top,
        wants_prompt_logprobs=drawn_by.of_prompt,
        penalties=Penalties(
            presence=fields.presence_penalty or 0.0,
            frequency=fields.frequency_penalty or 0.0,
            repetition=1.0 if fields.repetition_penalty is None else fields.repetition_penalty,
        ),
        grammar=drawn_by.grammar,
        logit_bias=tuple(sorted(fields.logit_bias.items())),
    )
