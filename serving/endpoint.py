"""`SchedulerEndpoint`: all that a door needs of the central scheduler, however it is reached."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from scheduler.messages import SubmitReply
from scheduler.spec import RequestSpec, RequestUid


class EndpointUnavailableError(Exception):
    """The central scheduler cannot be reached now; trying again later is right."""


class SchedulerEndpoint(Protocol):
    """Calls from a door to the central scheduler. Each may raise EndpointUnavailableError.

    Calls of one door are carried out in the order in which they were started.
    """

    async def submit(self, specs: Sequence[RequestSpec]) -> SubmitReply:
        """Queue these requests. Repeating a uid that is queued or running changes nothing."""
        ...

    async def cancel(self, uids: Sequence[RequestUid]) -> None:
        """End these requests everywhere; unknown or ended ones are ignored."""
        ...

    async def cluster_state(self) -> Mapping[str, object]:
        """What the cluster is doing, ready for JSON."""
        ...

    async def health(self) -> tuple[bool, str]:
        """Whether work can make progress now, and the reason when it cannot."""
        ...
