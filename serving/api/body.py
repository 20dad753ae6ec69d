"""Reads a request body: bounded while it arrives, then strict JSON."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from typing import NoReturn

from starlette.requests import Request

from serving.api.errors import ApiError

_BODY_TIMEOUT_S = 60.0
_DISCARDED_LIMITS = 4
"""How many times the limit is still read, and thrown away, of a body that is too large."""
_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")


async def read_json_object(request: Request, max_bytes: int, timeout_s: float = _BODY_TIMEOUT_S) -> dict[str, object]:
    """The body as a JSON object.

    Args:
        request: its body must not have been read.
        max_bytes: limit, whatever the client announced; what is above it is not kept.
        timeout_s: the whole body must be there within it.

    Raises:
        ApiError: 413 above the limit, 408 when it does not come in time, 400 for anything but a JSON object.
    """
    try:
        async with asyncio.timeout(timeout_s):
            raw = await _read(request, max_bytes)
    except TimeoutError:
        msg = f"The body did not arrive in {timeout_s:g} s."
        raise ApiError(408, msg, headers={"Connection": "close"}) from None
    try:
        document = json.loads(raw.decode("utf-8"), parse_constant=_refuse_constant)
        if _SURROGATE_ESCAPE.search(raw):
            # A pair is a character; half of one cannot be written as UTF-8, nor be tokenized.
            json.dumps(document, ensure_ascii=False).encode("utf-8")
    except RecursionError:
        msg = "The body is not valid JSON: it is nested too deeply."
        raise ApiError(400, msg) from None
    except ValueError as error:
        msg = f"The body is not valid JSON: {error}"
        raise ApiError(400, msg) from None
    if not isinstance(document, dict):
        msg = f"The body must be a JSON object, not {_json_name(document)}."
        raise ApiError(400, msg)
    return document


async def _read(request: Request, max_bytes: int) -> bytes:
    chunks = request.stream()
    announced = request.headers.get("content-length", "")
    if announced.isascii() and announced.isdigit() and (len(announced) > 18 or int(announced) > max_bytes):
        if "expect" not in request.headers:
            await _discard(chunks, _DISCARDED_LIMITS * max_bytes)
        raise _too_large(max_bytes)
    # An announcement may be missing (chunked) or false, so the bytes themselves are counted.
    body = bytearray()
    async for chunk in chunks:
        body += chunk
        if len(body) > max_bytes:
            await _discard(chunks, _DISCARDED_LIMITS * max_bytes)
            raise _too_large(max_bytes)
    return bytes(body)


async def _discard(chunks: AsyncIterator[bytes], max_bytes: int) -> None:
    """Read on without keeping anything: a client that is still sending would lose the answer to a reset."""
    async for chunk in chunks:
        max_bytes -= len(chunk)
        if max_bytes < 0:
            return


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(413, f"The body is larger than {max_bytes} bytes.", headers={"Connection": "close"})


def _refuse_constant(name: str) -> NoReturn:
    msg = f"{name} is not allowed"
    raise ValueError(msg)


def _json_name(value: object) -> str:
    match value:
        case str():
            return "a string"
        case list():
            return "an array"
        case bool():
            return "a boolean"
        case None:
            return "null"
        case _:
            return "a number"
