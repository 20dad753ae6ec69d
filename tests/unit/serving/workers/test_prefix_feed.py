"""PrefixFeed: the net change, told beside other reports or in time, and everything anew where count was lost."""

from collections.abc import Sequence

from manager import BlockHash, KVEvent, KVEventKind
from scheduler.prefix_changes import PrefixesChanged
from serving.workers.prefix_feed import PrefixFeed


class _Source:
    def __init__(self) -> None:
        self.events: list[KVEvent] = []
        self.known: tuple[BlockHash, ...] = ()

    def happen(self, kind: KVEventKind, *blocks: int) -> None:
        self.events.append(KVEvent(kind, block_hashes=_hashes(*blocks)))

    def take_kv_events(self) -> Sequence[KVEvent]:
        taken, self.events = self.events, []
        return taken

    def known_prefixes(self) -> Sequence[KVEvent]:
        return [KVEvent(KVEventKind.STORED, block_hashes=self.known)]


def _hashes(*blocks: int) -> tuple[BlockHash, ...]:
    return tuple(BlockHash(block) for block in blocks)


def test_what_comes_and_goes_between_two_reports_is_never_told() -> None:
    source = _Source()
    feed = PrefixFeed(source)
    source.happen(KVEventKind.STORED, 1, 2, 3)
    source.happen(KVEventKind.REMOVED, 3, 9)
    source.happen(KVEventKind.UPDATED, 1)
    source.happen(KVEventKind.STORED, 9)
    assert feed.take(1.0, may_wait=False) == PrefixesChanged(_hashes(1, 2))
    assert feed.take(2.0, may_wait=False) is None
    source.happen(KVEventKind.REMOVED, 2)
    assert feed.take(3.0, may_wait=False) == PrefixesChanged((), _hashes(2))


def test_a_change_waits_for_another_report_but_not_for_long() -> None:
    source = _Source()
    feed = PrefixFeed(source)
    source.happen(KVEventKind.STORED, 1)
    assert feed.take(1.0, may_wait=True) == PrefixesChanged(_hashes(1))
    source.happen(KVEventKind.STORED, 2)
    assert feed.take(1.1, may_wait=True) is None
    assert feed.take(1.3, may_wait=True) == PrefixesChanged(_hashes(2))
    source.happen(KVEventKind.STORED, 3)
    assert feed.take(1.4, may_wait=False) == PrefixesChanged(_hashes(3))


def test_after_an_overflow_everything_is_listed_and_earlier_changes_are_void() -> None:
    source = _Source()
    feed = PrefixFeed(source)
    source.happen(KVEventKind.REMOVED, 5)
    source.happen(KVEventKind.CLEARED)
    source.known = _hashes(7, 8)
    assert feed.take(1.0, may_wait=False) == PrefixesChanged(_hashes(7, 8), (), is_listing=True)
    assert feed.take(2.0, may_wait=False) is None


def test_a_new_term_is_told_everything_even_where_nothing_is_cached() -> None:
    feed = PrefixFeed(_Source())
    feed.list_anew()
    assert feed.take(1.0, may_wait=False) == PrefixesChanged(is_listing=True)
