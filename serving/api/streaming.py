"""Server-sent events: one JSON document per `data:` line, `[DONE]` once at the end.

The response exists only once the first real event does (I11): every fault before that has a true status
code, every fault after it is an event in the stream.
"""

import contextlib
import json
import logging
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from serving.api.answers import AnswerFormat, Json
from serving.api.disconnect import ClientDisconnectedError, until_disconnect
from serving.api.errors import internal_error, of_failure
from serving.generation_request import RequestFailedError
from serving.open_request import OpenRequest
from serving.stream import ChoiceDelta

_log = logging.getLogger(__name__)
_ENCODER = json.JSONEncoder(separators=(",", ":"))
_DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class StartedStream:
    """A stream whose first event is there.

    Attributes:
        first: that event.
        rest: the events after it.
    """

    opened: OpenRequest
    first: ChoiceDelta
    rest: AsyncGenerator[ChoiceDelta, None]


async def start_stream(opened: OpenRequest) -> StartedStream:
    """Wait for the first event. Closes the request when there is none.

    Raises:
        RequestFailedError: the request failed before it.
    """
    deltas = opened.deltas()
    try:
        first = await anext(deltas)
    except BaseException:
        opened.close()
        raise
    return StartedStream(opened, first, deltas)


class EventStreamResponse(StreamingResponse):
    """Sends a stream's events; closes the request at the end, or when the client leaves."""

    def __init__(self, stream: StartedStream, answers: AnswerFormat, *, has_usage: bool) -> None:
        """Args.

        stream: started.
        answers: how chunks are worded.
        has_usage: the last chunk has the usage.
        """
        self._stream = stream
        self._answers = answers
        self._has_usage = has_usage
        self._body = self._events()
        super().__init__(
            self._body,
            media_type="text/event-stream",
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send everything (ASGI)."""
        try:
            await until_disconnect(receive, self.stream_response(send))
        except (ClientDisconnectedError, OSError):
            _log.info("request %s: the client left its stream", self._stream.opened.api_id)
        finally:
            self._stream.opened.close()
            await self._body.aclose()

    async def _events(self) -> AsyncGenerator[bytes, None]:
        try:
            async with contextlib.aclosing(self._stream.rest) as rest:
                opened_choices: set[int] = set()
                for chunk in self._chunks(self._stream.first, opened_choices):
                    yield chunk
                async for delta in rest:
                    for chunk in self._chunks(delta, opened_choices):
                        yield chunk
            if self._has_usage:
                yield _event(self._answers.usage_chunk(self._stream.opened.usage()))
        except RequestFailedError as error:
            yield _event(of_failure(error).body())
        except Exception:
            _log.exception("request %s: the stream broke", self._stream.opened.api_id)
            yield _event(internal_error().body())
        yield _DONE

    def _chunks(self, delta: ChoiceDelta, opened_choices: set[int]) -> list[bytes]:
        chunks = []
        if delta.index not in opened_choices:
            opened_choices.add(delta.index)
            if (opening := self._answers.opening(delta)) is not None:
                chunks.append(_event(opening))
        if delta.text or delta.scored or delta.finish_reason is not None:
            chunk = self._answers.chunk(delta)
            if chunk is not None:
                chunks.append(_event(chunk))
        return chunks


def _event(document: Json) -> bytes:
    # ASCII only: some clients split lines at U+2028, which JSON may contain as it is.
    return b"data: " + _ENCODER.encode(document).encode("ascii") + b"\n\n"
