"""Moves pages between workers: tickets, leases, sessions, and the agent that runs them.

Transports are imported from `kvtransfer.transports`, one module each.
"""

from kvtransfer.agent import TransferAgent
from kvtransfer.errors import (
    HandshakeRefused,
    PeerError,
    PeerUnreachable,
    TransferError,
    TransferLogicError,
    TransportUnavailable,
)
from kvtransfer.messages import (
    GroupLayout,
    LeaseOutcome,
    MemoryDescription,
    PageCopy,
    PoolLayout,
    ReadStatus,
    ReceiveOutcome,
    ReceiveResult,
    SettleReply,
    TransferOutcome,
    TransferTicket,
)
from kvtransfer.peers import PeerChannel, PendingReply
from kvtransfer.plan import check_compatible

__all__ = [
    "GroupLayout",
    "HandshakeRefused",
    "LeaseOutcome",
    "MemoryDescription",
    "PageCopy",
    "PeerChannel",
    "PeerError",
    "PeerUnreachable",
    "PendingReply",
    "PoolLayout",
    "ReadStatus",
    "ReceiveOutcome",
    "ReceiveResult",
    "SettleReply",
    "TransferAgent",
    "TransferError",
    "TransferLogicError",
    "TransferOutcome",
    "TransferTicket",
    "TransportUnavailable",
    "check_compatible",
]
