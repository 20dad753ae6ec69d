"""A worker's ways out, over Ray: messages to the central scheduler and the doors, settles to its peers."""

import contextlib
from typing import Any

import ray

from kvtransfer.errors import PeerError
from kvtransfer.messages import ReaderId, SettleReply
from manager import Epoch, LeaseId, WorkerName
from scheduler.messages import ReportBatch, TokenBatch, WorkerHeartbeat
from serving.actors.directory import CENTRAL_NAME, Directory


class RaySinks:
    """A worker's messages as actor calls whose results nobody waits for."""

    def __init__(self, directory: Directory) -> None:
        """Use this directory."""
        self._directory = directory

    def send_reports(self, batch: ReportBatch) -> None:
        """To the central scheduler."""
        with contextlib.suppress(PeerError):
            self._directory.find(CENTRAL_NAME).reports.remote(batch)

    def send_heartbeat(self, heartbeat: WorkerHeartbeat) -> None:
        """To every actor that may be the central scheduler: the one that is, and is not followed yet, hears it too."""
        for central in self._directory.centrals():
            central.heartbeat.remote(heartbeat, self._directory.followed_term)

    def send_tokens(self, batch: TokenBatch) -> None:
        """To the door."""
        with contextlib.suppress(PeerError):
            self._directory.find(batch.door).on_tokens.remote(batch)


class RayReply:
    """A settle that is under way."""

    def __init__(self, reference: Any) -> None:
        """Wait for `reference`."""
        self._reference = reference

    def result(self) -> SettleReply | None:
        """The answer if it is there. Raises PeerError when the peer is gone."""
        ready, _ = ray.wait([self._reference], timeout=0)
        if not ready:
            return None
        try:
            return SettleReply(ray.get(ready[0]))
        except ray.exceptions.RayError as error:
            msg = f"settle was not answered: {type(error).__name__}"
            raise PeerError(msg) from error


class RayPeers:
    """The peer channel between workers."""

    def __init__(self, directory: Directory) -> None:
        """Use this directory."""
        self._directory = directory

    def settle(self, owner: WorkerName, lease_id: LeaseId, epoch: Epoch, reader: ReaderId) -> RayReply:
        """Ask the owner of a lease."""
        return RayReply(self._directory.find(owner).settle.remote(lease_id, epoch, reader))
