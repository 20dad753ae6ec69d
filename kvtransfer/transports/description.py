"""Reading what a peer wrote about its memory. It comes over the wire: every field is checked before it is used."""

from typing import TypeVar

from kvtransfer.errors import PeerError
from kvtransfer.messages import MemoryDescription

_V = TypeVar("_V", str, int, bytes)


def attribute(source: MemoryDescription, transport: str, name: str, kind: type[_V]) -> _V:
    """A field of a description.

    Args:
        source: what the peer wrote.
        transport: the reader's own name; a description of another transport has nothing for it.
        name: of the field.
        kind: its type.

    Raises:
        PeerError: it is another transport's, or the field is missing or of another type.
    """
    value = source.attributes.get(name)
    if source.transport != transport or not isinstance(value, kind):
        msg = f"not a description of the {transport} transport: {source.transport} with {name}={value!r}"
        raise PeerError(msg)
    return value
