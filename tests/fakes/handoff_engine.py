"""What computes and copies in a handoff world: an engine whose KV shows whose it is, and copies that can fail.

The engine checks every visible position of a request before it computes: a page that was reused early, filled by
another's bytes or trusted too soon is seen at the next step of whoever uses it.
"""

from collections.abc import Callable, Sequence

import numpy as np

from manager import KVCacheManagerV2, RequestId
from manager.errors import CopyFailedError
from manager.pools.base import SlotCopy, SlotPool
from serving.engine.batch import StepBatch, StepResult
from tests.fakes.page_contents import PageContents

_FIRST_DRAWN_TOKEN = 1 << 20


def drawn_token(seed: int, position: int) -> int:
    """What a request draws at a position, wherever it is computed."""
    return _FIRST_DRAWN_TOKEN + seed * 1000 + position


class StepFaultError(Exception):
    """An injected failure of a step."""


class HandoffEngine:
    """A `StepEngine` over pages of known contents.

    Attributes:
        fails_in: steps until one raises, after it has written half of its rows; 0 is the next, None is never.
        violations: what was found in pages that should have held something else.
        num_steps: steps begun.
    """

    def __init__(
        self, contents: PageContents, manager: KVCacheManagerV2, tokens_of: Callable[[RequestId], Sequence[int]]
    ) -> None:
        """`tokens_of` names every known token of a request that is in a step."""
        self._contents = contents
        self._manager = manager
        self._tokens_of = tokens_of
        self.fails_in: int | None = None
        self.violations: list[str] = []
        self.num_steps = 0

    def step(self, batch: StepBatch) -> StepResult:
        """Check what is read, write what is computed, draw by the rule. Raises StepFaultError when told to."""
        self.num_steps += 1
        fails = self.fails_in == 0
        if self.fails_in is not None:
            self.fails_in = None if fails else self.fails_in - 1
        drawn: dict[RequestId, int] = {}
        for rows in batch.sequences:
            tokens = list(self._tokens_of(rows.request_id))
            try:
                self._contents.check(self._manager, rows.request_id, tokens)
            except AssertionError as error:
                self.violations.append(str(error))
            if tokens[rows.start : rows.start + len(rows.token_ids)] != rows.token_ids.tolist():
                self.violations.append(f"{rows.request_id}: rows at {rows.start} are not its tokens")
            span = range(rows.start, rows.start + len(rows.token_ids))
            if fails:
                self._contents.write(self._manager, rows.request_id, [-1] * len(tokens), span)
                msg = "injected"
                raise StepFaultError(msg)
            self._contents.write(self._manager, rows.request_id, tokens, span)
            if rows.sampling is not None:
                drawn[rows.request_id] = drawn_token(rows.sampling.seed, rows.sampling.position)
        return StepResult(drawn)


class PlainCopies:
    """A `CopyEngine` that copies at once, in the calling thread.

    Attributes:
        fails_stage: the next staged batch fails half-way.
        fails_fill: the next fill's last copy does not arrive.
        num_staged: copies to lower tiers so far.
        num_filled: copies to the device so far.
    """

    def __init__(self, pools: Sequence[SlotPool]) -> None:
        """Stores in the order of `pools`."""
        self._pools = pools
        self._failed: list[SlotCopy] = []
        self.fails_stage = False
        self.fails_fill = False
        self.num_staged = 0
        self.num_filled = 0

    def stage(self, copies: Sequence[SlotCopy]) -> None:
        """See `CopyEngine.stage`."""
        for copy in copies:
            if self.fails_stage:
                self.fails_stage = False
                raise CopyFailedError(copy.target_store, OSError("injected"))
            self._copy(copy)
            self.num_staged += 1

    def fill(self, copies: Sequence[SlotCopy]) -> None:
        """See `CopyEngine.fill`."""
        kept = list(copies)
        if kept and self.fails_fill:
            self.fails_fill = False
            self._failed.append(kept.pop())
        for copy in kept:
            self._copy(copy)
            self.num_filled += 1

    def wait(self) -> Sequence[SlotCopy]:
        """See `CopyEngine.wait`."""
        failed, self._failed = self._failed, []
        return failed

    def close(self) -> None:
        """Nothing to stop."""

    def _copy(self, copy: SlotCopy) -> None:
        target = self._pools[copy.target_store]
        page = np.empty(target.slot_bytes, np.uint8)
        self._pools[copy.source_store].read(copy.source_slot, page)
        target.write(copy.target_slot, page)
