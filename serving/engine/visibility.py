"""Which keys a query may see: all before it, or a sliding window of them and the sinks.

    0      sinks                          query - window      query
    |--------|------------------------------------|-------------|
     visible          hidden                        visible       hidden

Pure arithmetic on positions. Hidden positions whose page has left the window are never read: a unit or a tile
that no query of an item sees is left out, or replaced by one that is seen.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class Visibility:
    """What the layers of one group let a query see.

    Attributes:
        window: positions that a query sees, itself included; None for all.
        num_sink_tokens: first positions that every query sees as well.
    """

    window: int | None = None
    num_sink_tokens: int = 0

    def first_in_window(self, query: int) -> int:
        """The first position of a query's window."""
        return 0 if self.window is None else max(0, query - self.window + 1)

    def runs(self, first: int, end: int, size: int) -> npt.NDArray[np.int64]:
        """Which runs of `size` positions queries [first, end) see something of.

        Args:
            first: the first query; it has the earliest window.
            end: one past the last query, and past the last visible position.
            size: positions of a run: a block, a unit or a tile.

        Returns:
            Ordinals, rising: the runs of the sinks, then those of the window.
        """
        last = -(-end // size)
        in_window = self.first_in_window(first) // size
        in_sinks = min(in_window, -(-self.num_sink_tokens // size))
        return np.concatenate([np.arange(in_sinks), np.arange(in_window, last)])

    def hides(self, queries: npt.NDArray[np.int64], keys: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """True where a query must not see a key; two arrays of positions that broadcast."""
        hidden = keys > queries
        if self.window is not None:
            hidden |= (keys <= queries - self.window) & (keys >= self.num_sink_tokens)
        return hidden
