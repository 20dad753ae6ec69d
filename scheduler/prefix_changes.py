"""`PrefixesChanged`: what a worker's cache gained and lost, by block hash. A frozen value on the wire."""

from dataclasses import dataclass

from manager import BlockHash


@dataclass(frozen=True, slots=True)
class PrefixesChanged:
    """The worker's cached blocks, since the last such report of this life.

    Attributes:
        stored: can be reused there now, in whatever tier.
        removed: can no longer.
        is_listing: `stored` is everything, and what was said before is void: a new term asked, or the worker has
            lost count of its changes.
    """

    stored: tuple[BlockHash, ...] = ()
    removed: tuple[BlockHash, ...] = ()
    is_listing: bool = False
