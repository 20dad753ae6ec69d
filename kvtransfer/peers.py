"""How an agent asks other workers: the one question that a receive ends with.

`serving` implements it over its actors; tests over a dictionary. No bytes of pages pass here.
"""

from typing import Protocol

from kvtransfer.messages import ReaderId, SettleReply
from manager import Epoch, LeaseId, WorkerName


class PendingReply(Protocol):
    """An answer that may not be here yet."""

    def result(self) -> SettleReply | None:
        """The answer, or None while there is none. Never blocks; may be called again and again.

        Raises:
            PeerError: the owner is gone or refused to answer; there will be no answer.
        """
        ...


class PeerChannel(Protocol):
    """Reaches the agents of other workers. Called from the agent thread only; no call blocks."""

    def settle(self, owner: WorkerName, lease_id: LeaseId, epoch: Epoch, reader: ReaderId) -> PendingReply:
        """Ask `owner` for `TransferAgent.settle(lease_id, epoch, reader, its own now_s)`.

        Args:
            owner: the worker that gave the lease.
            lease_id: the lease that was read.
            epoch: the owner's life, as its ticket says.
            reader: the receive that read it.

        Raises:
            PeerError: the owner cannot be reached.
        """
        ...
