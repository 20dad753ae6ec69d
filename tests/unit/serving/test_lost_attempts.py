"""How many lost attempts a request may have: misfortune has no limit, a request that kills its workers has one."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from scheduler.messages import ErrorKind
from scheduler.spec import RequestUid
from serving.generation_request import RequestFailedError
from tests.fakes.door import eventually, run_async
from tests.unit.serving.test_frontend import finish, make_request, opened

_UID = RequestUid("r/0")


async def _lose(cluster: Any, num_tokens: int) -> None:
    """One attempt that brings so many tokens first."""
    await eventually(lambda: _UID in cluster.running)
    for _ in range(num_tokens):
        cluster.step()
    cluster.lose_attempts()


@run_async
async def test_a_stream_that_gets_on_survives_any_number_of_dead_workers(tiny_folder: Path) -> None:
    async with opened(tiny_folder, max_resubmissions=2) as (frontend, cluster):
        request = await frontend.submit(make_request(max_tokens=20))
        for _ in range(9):
            await _lose(cluster, num_tokens=2)
        await eventually(lambda: _UID in cluster.running)
        while cluster.running:
            cluster.step()
        assert len(await finish(request)) == 20
        assert frontend.counters()["resubmissions"] == 9


@pytest.mark.parametrize("num_tokens", [0, 1])
@run_async
async def test_a_request_whose_attempts_die_at_once_again_and_again_fails(tiny_folder: Path, num_tokens: int) -> None:
    async with opened(tiny_folder, max_resubmissions=2) as (frontend, cluster):
        request = await frontend.submit(make_request(max_tokens=20))
        for _ in range(3):
            await _lose(cluster, num_tokens)
        with pytest.raises(RequestFailedError, match="2 resubmissions without progress") as failed:
            await finish(request)
        assert failed.value.kind is ErrorKind.WORKER_LOST
        assert frontend.counters()["resubmissions"] == 2


@run_async
async def test_progress_between_losses_forgives_the_earlier_ones(tiny_folder: Path) -> None:
    async with opened(tiny_folder, max_resubmissions=2) as (frontend, cluster):
        request = await frontend.submit(make_request(max_tokens=20))
        for num_tokens in (0, 0, 3, 0, 1):
            await _lose(cluster, num_tokens)
        await eventually(lambda: _UID in cluster.running)
        while cluster.running:
            cluster.step()
        assert len(await finish(request)) == 20


@run_async
async def test_the_timeline_of_an_interrupted_stream_tells_each_interruption(tiny_folder: Path) -> None:
    async with opened(tiny_folder) as (frontend, cluster):
        request = await frontend.submit(make_request(max_tokens=20))
        for _ in range(2):
            await _lose(cluster, num_tokens=2)
            await asyncio.sleep(0.01)
        await eventually(lambda: _UID in cluster.running)
        while cluster.running:
            cluster.step()
        await finish(request)
        told: Any = frontend.timeline("r")
        recoveries = told["choices"][0]["recoveries"]
        assert len(recoveries) == 2
        assert all(recovery["own_s"] >= 0 and recovery["resubmit_s"] is not None for recovery in recoveries)
