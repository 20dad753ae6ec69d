"""`FakePeers`: a peer channel over agents of this process whose answers a test can hold back or lose."""

from dataclasses import dataclass, field

from kvtransfer.agent import TransferAgent
from kvtransfer.errors import PeerError
from kvtransfer.messages import ReaderId, SettleReply
from manager import Epoch, LeaseId, WorkerName


@dataclass
class FakeReply:
    """An answer that is there once it was delivered."""

    reply: SettleReply
    is_delivered: bool = True
    is_lost: bool = False

    def result(self) -> SettleReply | None:
        """The answer, None, or PeerError."""
        if self.is_lost:
            msg = "the owner is gone"
            raise PeerError(msg)
        return self.reply if self.is_delivered else None


@dataclass
class FakePeers:
    """Reaches the agents in `agents` at the time `now_s`, which the test moves."""

    agents: dict[WorkerName, TransferAgent] = field(default_factory=dict)
    now_s: float = 0.0
    holds_answers: bool = False
    replies: list[FakeReply] = field(default_factory=list)

    def settle(self, owner: WorkerName, lease_id: LeaseId, epoch: Epoch, reader: ReaderId) -> FakeReply:
        """Ask at once; the answer is delivered at once unless answers are held."""
        if owner not in self.agents:
            msg = f"{owner} cannot be reached"
            raise PeerError(msg)
        answer = self.agents[owner].settle(lease_id, epoch, reader, self.now_s)
        self.replies.append(FakeReply(answer, is_delivered=not self.holds_answers))
        return self.replies[-1]
