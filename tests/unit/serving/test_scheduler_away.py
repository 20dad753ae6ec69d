"""A lost attempt while the central scheduler is being restarted: the successor hears of it at once."""

import asyncio
from pathlib import Path

from scheduler.spec import RequestUid
from tests.fakes.door import eventually, run_async
from tests.unit.serving.test_frontend import finish, make_request, opened


@run_async
async def test_a_lost_attempt_is_submitted_within_a_moment_of_the_central_schedulers_return(tiny_folder: Path) -> None:
    # By growing delays the next try would come a minute later.
    slow = {"resubmit_delay_s": 60.0, "max_resubmit_delay_s": 60.0}
    async with opened(tiny_folder, restart_patience_s=30.0, **slow) as (frontend, cluster):
        request = await frontend.submit(make_request(max_tokens=6))
        cluster.step()
        cluster.is_reachable = False
        cluster.lose_attempts()
        await asyncio.sleep(0.35)
        assert RequestUid("r/0") not in cluster.running
        cluster.is_reachable = True
        await eventually(lambda: RequestUid("r/0") in cluster.running)
        while cluster.running:
            cluster.step()
        assert len(await finish(request)) == 6
