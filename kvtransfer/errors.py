"""Errors of the transfer layer.

TransferError
├── PeerError            the other side or the wire: fail or retry that one request
│   ├── HandshakeRefused the two sides do not fit; names the field
│   └── PeerUnreachable  not by this transport; another may
├── TransportUnavailable this host lacks what a transport needs; said at start-up
└── TransferLogicError   a bug of ours
"""


class TransferError(Exception):
    """Root of the transfer layer's errors."""


class PeerError(TransferError):
    """The peer is gone, silent or wrong. Affects one request."""


class HandshakeRefused(PeerError):  # noqa: N818 -- named for what happened
    """The two pools do not fit each other; the message names the first field that differs."""


class PeerUnreachable(PeerError):  # noqa: N818 -- named for what is the case
    """This transport has no way to the peer's memory, dead or alive; another one may have."""


class TransportUnavailable(TransferError):  # noqa: N818 -- named for what is the case
    """A package, a driver or a cluster that a transport needs is missing on this host."""


class TransferLogicError(TransferError):
    """A call in the wrong state. Never caught below the process boundary."""
