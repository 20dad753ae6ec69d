"""The machine of `test_central_machine`, routed by cached prefixes, with prompts that generation workers compute."""

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import invariant, rule

from configs import DispatchPolicy, RouterConfig
from manager import ReuseScope, block_hashes
from scheduler.prefix_changes import PrefixesChanged
from tests.properties.test_central_machine import CentralMachine

_ROUTER = RouterConfig(local_prefill_max_tokens=8, local_prefill_max_waiting=2, max_index_blocks=12)
_SETTINGS = settings(max_examples=60, stateful_step_count=50, deadline=None, derandomize=True, database=None)


class _Routed(CentralMachine):
    """Workers say what they have cached, truly or not: it is a hint."""

    router = _ROUTER

    @rule(data=st.data(), num_tokens=st.integers(0, 40), is_listing=st.booleans(), is_removal=st.booleans())
    def publish_cached_blocks(self, data: st.DataObject, num_tokens: int, is_listing: bool, is_removal: bool) -> None:
        worker = self._draw_worker(data)
        if worker is not None:
            hashes = tuple(block_hashes(range(num_tokens), worker.tokens_per_block, ReuseScope("")))
            removed = hashes if is_removal and not is_listing else ()
            worker.reports.append(PrefixesChanged(() if removed else hashes, removed, is_listing))

    @invariant()
    def the_index_counts_what_live_workers_hold(self) -> None:
        self._books.prefixes.audit()
        assert self._books.prefixes.num_blocks <= _ROUTER.max_index_blocks
        for record in self._books.ledger:
            assert record.is_live or not self._books.prefixes.num_held(record.worker)


class _RoutedGenerationFirst(_Routed):
    """Reservations before contexts."""

    dispatch = DispatchPolicy.GENERATION_FIRST


class _RoutedSucceeded(_Routed):
    """The central scheduler dies at any moment."""

    is_succeeded = True


TestRouted = _Routed.TestCase
TestRouted.settings = _SETTINGS
TestRoutedGenerationFirst = _RoutedGenerationFirst.TestCase
TestRoutedGenerationFirst.settings = _SETTINGS
TestRoutedSucceeded = _RoutedSucceeded.TestCase
TestRoutedSucceeded.settings = _SETTINGS
