"""`DoorPeers`: what one door asks the others, and the workers, so that any of them can answer for all.

A request belongs to the door that took it. Whoever asks about it, or scrapes metrics, reaches whichever door the
kernel gives the connection to: that one asks the others. A door that does not answer in time is left out.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from prometheus_client import Metric

from scheduler.spec import DoorName
from serving.metrics.recent_latencies import RecentLatencies
from serving.tracing.chrome import AnchoredHistory

LIFE_MARK = "#"
"""Between the name of an actor and the number of its life, where each life has a name of its own."""


def place_of(door: DoorName) -> str:
    """The door's name without its life: the same for what replaces it."""
    return door.partition(LIFE_MARK)[0]


@dataclass(frozen=True, slots=True)
class DoorAccount:
    """One door's account of itself. Crosses processes.

    Attributes:
        door: for GET /cluster/state, ready for JSON.
        pid: of its process.
        metrics: its own families, each sample labelled with the door.
        latencies: the last ones.
        requests: timelines, the newest first, those that run before those that ended; ready for JSON.
    """

    door: Mapping[str, object]
    pid: int
    metrics: tuple[Metric, ...]
    latencies: RecentLatencies
    requests: tuple[Mapping[str, object], ...]


class DoorPeers(Protocol):
    """The other processes of a deployment. Calls never raise for one that is gone, and return within seconds."""

    async def accounts(self) -> Sequence[DoorAccount]:
        """Of those that answer."""
        ...

    async def timeline(self, api_id: str) -> Mapping[str, object] | None:
        """Of a request that one of them took, ready for JSON; None when none of them knows it."""
        ...

    async def histories(self, seconds: float) -> Sequence[AnchoredHistory]:
        """What workers and the central scheduler did in the last `seconds`: of those that answer."""
        ...


class NoPeers:
    """There is only this door."""

    async def accounts(self) -> Sequence[DoorAccount]:
        """None."""
        return ()

    async def timeline(self, api_id: str) -> Mapping[str, object] | None:
        """Never known."""
        return None

    async def histories(self, seconds: float) -> Sequence[AnchoredHistory]:
        """Nothing is known."""
        return ()
