"""`AllDoors`: this door and the others as one, for everything that only tells."""

import asyncio
import json
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import chain

from serving.door_peers import DoorAccount, DoorPeers
from serving.frontend import Frontend
from serving.metrics import RecentLatencies
from serving.timeline import StreamState
from serving.tracing.chrome import chrome_trace


class AllDoors:
    """Answers for every door. Lives on the frontend's event loop."""

    def __init__(self, frontend: Frontend, peers: DoorPeers) -> None:
        """Args.

        frontend: of this door.
        peers: the others.
        """
        self._frontend = frontend
        self._peers = peers

    async def accounts(self) -> list[DoorAccount]:
        """This door's first, then those of the others that answer, by name."""
        others = sorted(await self._peers.accounts(), key=lambda account: str(account.door["name"]))
        return [self._frontend.account(), *others]

    async def timeline(self, api_id: str) -> Mapping[str, object] | None:
        """Of a request, whichever door took it; None when no door knows it."""
        own = self._frontend.timeline(api_id)
        return await self._peers.timeline(api_id) if own is None else own

    async def chrome_trace(self, seconds: float) -> bytes:
        """What every process did in the last `seconds`, as a JSON document for Perfetto."""
        histories = await self._peers.histories(seconds)
        # Megabytes of text take a while, in which streams go on.
        return await asyncio.to_thread(lambda: json.dumps(chrome_trace(histories)).encode())


def door_states(accounts: Sequence[DoorAccount]) -> list[dict[str, object]]:
    """For GET /cluster/state, in the order of their names."""
    return sorted(({**account.door, "pid": account.pid} for account in accounts), key=lambda door: str(door["name"]))


def newest_requests(accounts: Sequence[DoorAccount], limit: int) -> list[Mapping[str, object]]:
    """Timelines of all doors: those that run before those that ended, each door's newest first."""
    requests = list(chain.from_iterable(account.requests for account in accounts))
    requests.sort(key=lambda request: request["state"] != StreamState.RUNNING)
    return requests[:limit]


def recent_latencies(accounts: Sequence[DoorAccount]) -> RecentLatencies:
    """The last latencies of all doors together."""
    return RecentLatencies(
        deque(chain.from_iterable(account.latencies.first_token_s for account in accounts)),
        deque(chain.from_iterable(account.latencies.inter_token_s for account in accounts)),
    )
