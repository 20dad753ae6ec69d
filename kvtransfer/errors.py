"""Errors of the transfer layer.

TransferError
├── PeerError            the other side or the wire: fail or retry that one request
│   └── HandshakeRefused the two sides do not fit; names the field
└── TransferLogicError   a bug of ours
"""


class TransferError(Exception):
    """Root of the transfer layer's errors."""


class PeerError(TransferError):
    """The peer is gone, silent or wrong. Affects one request."""


class HandshakeRefused(PeerError):  # noqa: N818 -- named for what happened
    """The two pools do not fit each other; the message names the first field that differs."""


class TransferLogicError(TransferError):
    """A call in the wrong state. Never caught below the process boundary."""
