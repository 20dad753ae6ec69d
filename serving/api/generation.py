"""The two generating endpoints: prepare, run, answer; and give up when the client leaves."""

import logging
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from serving.api.answers import FinishedChoice, Json
from serving.api.best_of import likeliest
from serving.api.body import read_json_object
from serving.api.disconnect import ClientDisconnectedError, until_disconnect
from serving.api.errors import ApiError, of_failure, of_invalid
from serving.api.prepare import PreparedRequest, RequestPreparer
from serving.api.streaming import EventStreamResponse, StartedStream, start_stream
from serving.frontend import Frontend
from serving.generation_request import InvalidRequestError, RequestFailedError
from serving.stream import ChoiceDelta
from serving.trace_context import TraceContext

_log = logging.getLogger(__name__)
_CLIENT_CLOSED_REQUEST = 499
"""Nobody reads this answer; it is for the access log."""

Prepare = Callable[[Mapping[str, object]], Awaitable[PreparedRequest]]


class GenerationEndpoints:
    """Handlers of POST /v1/completions and /v1/chat/completions."""

    def __init__(self, frontend: Frontend, preparer: RequestPreparer, max_body_bytes: int) -> None:
        """Args.

        frontend: runs requests.
        preparer: checks them.
        max_body_bytes: limit of a body.
        """
        self._frontend = frontend
        self._preparer = preparer
        self._max_body_bytes = max_body_bytes

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions."""
        return await self._answer(request, self._preparer.completion)

    async def chat_completions(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        return await self._answer(request, self._preparer.chat)

    async def _answer(self, request: Request, prepare: Prepare) -> Response:
        body = await read_json_object(request, self._max_body_bytes)
        try:
            prepared = _traced(await self._prepared(prepare, body), request)
            if prepared.is_stream:
                stream = await until_disconnect(request.receive, self._start(prepared))
                return EventStreamResponse(stream, prepared.answers, has_usage=prepared.has_usage)
            return JSONResponse(await until_disconnect(request.receive, self._run(prepared)))
        except InvalidRequestError as error:
            raise of_invalid(error) from error
        except RequestFailedError as error:
            raise of_failure(error) from error
        except ClientDisconnectedError:
            _log.info("the client left before its answer")
            return Response(status_code=_CLIENT_CLOSED_REQUEST)

    async def _prepared(self, prepare: Prepare, body: Mapping[str, object]) -> PreparedRequest:
        try:
            return await prepare(body)
        except RecursionError:
            # Whoever walks through a value at this depth: what was just deep enough to be read cannot be written.
            raise ApiError(400, "The body is nested too deeply.") from None

    async def _start(self, prepared: PreparedRequest) -> StartedStream:
        return await start_stream(await self._frontend.submit(prepared.generation))

    async def _run(self, prepared: PreparedRequest) -> Json:
        opened = await self._frontend.submit(prepared.generation)
        try:
            deltas: list[list[ChoiceDelta]] = [[] for _ in opened.choices]
            async for delta in opened.deltas():
                deltas[delta.index].append(delta)
            choices = [_joined(parts) for parts in deltas]
            wanted = likeliest(choices, prepared.generation.num_choices, prepared.num_wanted)
            return prepared.answers.whole(wanted, opened.usage())
        finally:
            opened.close()


def _traced(prepared: PreparedRequest, request: Request) -> PreparedRequest:
    """Part of the caller's trace, or of a new one."""
    trace = TraceContext.of_header(request.headers.get("traceparent", ""), secrets.token_hex(16))
    return replace(prepared, generation=replace(prepared.generation, trace=trace))


def _joined(parts: Sequence[ChoiceDelta]) -> FinishedChoice:
    """All of a finished choice's deltas as one."""
    reason = parts[-1].finish_reason
    assert reason is not None, "a finished choice's last delta has its reason"
    return FinishedChoice(
        text="".join(part.text for part in parts),
        finish_reason=reason,
        scored=tuple(chain.from_iterable(part.scored for part in parts)),
        prompt_logprobs=parts[0].prompt_logprobs,
    )
