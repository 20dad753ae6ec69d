"""`PrefixFeed`: from the manager's KV events to reports of what is cached here (C3).

    manager ─► KV events of many transactions ─► net change ─► PrefixesChanged, beside the next other report

What comes and goes between two reports is never told. The feed owns no truth: when the manager's queue overflowed,
or a new central scheduler asks, everything is listed anew.
"""

from collections.abc import Sequence
from typing import Protocol

from manager import BlockHash, KVEvent, KVEventKind
from scheduler.prefix_changes import PrefixesChanged

_MAX_DELAY_S = 0.25


class KVEventSource(Protocol):
    """What the feed needs of the manager."""

    def take_kv_events(self) -> Sequence[KVEvent]:
        """Events since the last call; only CLEARED where there were too many."""
        ...

    def known_prefixes(self) -> Sequence[KVEvent]:
        """Everything that is cached, as STORED events."""
        ...


class PrefixFeed:
    """What was not told yet. On the loop's thread only."""

    def __init__(self, source: KVEventSource) -> None:
        """Nothing is cached and nothing was told."""
        self._source = source
        self._stored: dict[BlockHash, None] = {}
        self._removed: dict[BlockHash, None] = {}
        self._is_listing = False
        self._told_at_s = float("-inf")

    def list_anew(self) -> None:
        """A new term knows nothing of this worker: the next report has everything."""
        self._is_listing = True

    def take(self, now_s: float, *, may_wait: bool) -> PrefixesChanged | None:
        """The net change since the last report, or None where there is none.

        Args:
            now_s: the caller's clock.
            may_wait: nothing else is reported now; a change that is not due yet is kept for later.
        """
        for event in self._source.take_kv_events():
            self._on_event(event)
        if may_wait and now_s - self._told_at_s < _MAX_DELAY_S:
            return None
        if self._is_listing:
            self._removed.clear()
            self._stored = dict.fromkeys(
                block for event in self._source.known_prefixes() for block in event.block_hashes
            )
        if not (self._stored or self._removed or self._is_listing):
            return None
        changes = PrefixesChanged(tuple(self._stored), tuple(self._removed), self._is_listing)
        self._stored, self._removed, self._is_listing = {}, {}, False
        self._told_at_s = now_s
        return changes

    def _on_event(self, event: KVEvent) -> None:
        match event.kind:
            case KVEventKind.STORED:
                _cancel_out(event.block_hashes, self._removed, self._stored)
            case KVEventKind.REMOVED:
                _cancel_out(event.block_hashes, self._stored, self._removed)
            case KVEventKind.UPDATED:
                pass  # another tier is still cached
            case KVEventKind.CLEARED:
                self._is_listing = True


def _cancel_out(blocks: tuple[BlockHash, ...], opposite: dict[BlockHash, None], same: dict[BlockHash, None]) -> None:
    """What is told takes back what was to be told to the contrary, or is to be told itself."""
    for block in blocks:
        if block in opposite:
            del opposite[block]
        else:
            same[block] = None
