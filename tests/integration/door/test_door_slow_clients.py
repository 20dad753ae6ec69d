"""Clients that connect and send nothing, or half a head: each is given up after a while, and nobody else is."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import ClassVar

from serving.api.head_deadline import HeadDeadlineProtocol
from tests.fakes.door import open_door, run_async
from tests.fakes.listening import listening

_REQUEST = b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n"


class _Impatient(HeadDeadlineProtocol):
    head_timeout_s: ClassVar[float] = 0.2


@asynccontextmanager
async def _connection(folder: Path) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    async with open_door(folder) as door, listening(door.app, http=_Impatient) as url:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        try:
            yield reader, writer
        finally:
            writer.close()


async def _is_closed(reader: asyncio.StreamReader) -> bool:
    try:
        async with asyncio.timeout(1):
            return await reader.read() == b""
    except TimeoutError:
        return False


@run_async
async def test_a_silent_connection_is_closed(tiny_folder: Path) -> None:
    async with _connection(tiny_folder) as (reader, _):
        assert await _is_closed(reader)


@run_async
async def test_a_head_that_drips_is_given_up(tiny_folder: Path) -> None:
    async with _connection(tiny_folder) as (reader, writer):
        for byte in _REQUEST[:20]:
            if reader.at_eof():
                break
            writer.write(bytes([byte]))
            await asyncio.sleep(0.05)
        assert reader.at_eof()


@run_async
async def test_a_second_head_that_stops_halfway_is_given_up(tiny_folder: Path) -> None:
    async with _connection(tiny_folder) as (reader, writer):
        writer.write(_REQUEST)
        assert (await reader.readuntil(b"}")).startswith(b"HTTP/1.1 200")
        writer.write(_REQUEST[:5])
        assert await _is_closed(reader)


@run_async
async def test_a_connection_between_two_requests_and_a_body_that_takes_its_time_are_not(tiny_folder: Path) -> None:
    body = b'{"model": "tiny", "prompt": "a", "max_tokens": 1}'
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
    async with _connection(tiny_folder) as (reader, writer):
        writer.write(_REQUEST)
        await reader.readuntil(b"}")
        await asyncio.sleep(0.4)
        writer.write(head + body[:9])
        await asyncio.sleep(0.4)
        writer.write(body[9:])
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
