"""Send jobs: to so many clients at a time, or each when it is due."""

import asyncio
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from tqdm import tqdm

from serving.bench.load.client import Target
from serving.bench.load.sample import Sample
from serving.bench.load.workload import Job

_Send = Callable[[Job, float], Coroutine[Any, Any, None]]


async def drive(
    target: Target, jobs: Sequence[Job], *, clients: int | None = None, background: Sequence[Job] = (), title: str = ""
) -> tuple[list[Sample], float]:
    """Complete all jobs.

    Args:
        target: what completes them.
        jobs: with `clients`, taken in order by whoever is free; without, sent when due, however many are open.
        clients: of the closed loop.
        background: a further closed loop of one client each, started again and again until the jobs are done;
            what of it finished counts as well.
        title: of the progress bar.

    Returns:
        The samples in the order in which they ended, and the seconds that the whole took.

    Raises:
        RefusedError: a request was not completed; the run ends then.
        httpx.HTTPError: the server could not be reached.
    """
    samples: list[Sample] = []
    started_s = time.perf_counter()
    with tqdm(total=len(jobs), desc=title, unit="request", file=sys.stderr, leave=False) as progress:

        async def send(job: Job, due_s: float) -> None:
            samples.append(await target.complete(job, due_s))
            progress.update()

        async def repeat(job: Job) -> None:
            while True:
                samples.append(await target.complete(job, time.perf_counter()))

        try:
            async with asyncio.TaskGroup() as group:
                noise = [group.create_task(repeat(job)) for job in background]
                await (_closed(send, jobs, clients) if clients else _open(send, jobs, started_s))
                for task in noise:
                    task.cancel()
        except ExceptionGroup as errors:
            raise _first(errors) from None
    return samples, time.perf_counter() - started_s


async def _closed(send: _Send, jobs: Sequence[Job], clients: int) -> None:
    todo = iter(jobs)

    async def work() -> None:
        for job in todo:
            await send(job, time.perf_counter())

    async with asyncio.TaskGroup() as group:
        for _ in range(clients):
            group.create_task(work())


async def _open(send: _Send, jobs: Sequence[Job], started_s: float) -> None:
    async with asyncio.TaskGroup() as group:
        for job in jobs:
            due_s = started_s + job.due_s
            await asyncio.sleep(due_s - time.perf_counter())
            group.create_task(send(job, due_s))


def _first(error: Exception) -> Exception:
    """The first failure: the others are its consequences, or the same."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error
