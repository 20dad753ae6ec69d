"""`PrefixIndex`: which worker has which block cached, as far as the workers have said.

    block hash -> bit set of holders        one walk along a prompt's hashes finds every worker's overlap

A hint and never the truth: a worker may have evicted what is listed here, or hold what is not. A request that is
routed by it finds at its worker what really is there. Entries belong to one life of a worker and go with it; a new
term knows none until workers have listed theirs. At most `max_blocks` hashes are kept, further ones are counted and
not found.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from manager import BlockHash, LogicError, WorkerName
from scheduler.prefix_changes import PrefixesChanged


class PrefixIndex:
    """Cached blocks of every live worker.

    Attributes:
        counters: cumulative: blocks stored and removed, listings, and blocks for which there was no place.
    """

    def __init__(self, max_blocks: int) -> None:
        """Know nothing."""
        self.counters: Counter[str] = Counter(
            dict.fromkeys(("stored_blocks", "removed_blocks", "listings", "unindexed_blocks"), 0)
        )
        self._max_blocks = max_blocks
        self._holders: dict[BlockHash, int] = {}
        self._bits: dict[WorkerName, int] = {}
        self._num_blocks: dict[WorkerName, int] = {}

    def apply(self, worker: WorkerName, changes: PrefixesChanged) -> None:
        """A live worker has said what changed. Mutates."""
        if changes.is_listing:
            self.forget(worker)
            self.counters["listings"] += 1
        if worker not in self._bits:
            self._bits[worker] = self._free_bit()
            self._num_blocks[worker] = 0
        self._remove(worker, changes.removed)
        self._store(worker, changes.stored)

    def forget(self, worker: WorkerName) -> None:
        """A life has ended, or is about to list everything anew. Unknown ones are ignored."""
        bit = self._bits.pop(worker, 0)
        if self._num_blocks.pop(worker, 0):
            rest = ~bit
            self._holders = {block: left for block, held in self._holders.items() if (left := held & rest)}

    def cached_blocks(self, hashes: Sequence[BlockHash]) -> Mapping[WorkerName, int]:
        """How many leading blocks of a prompt each worker has; those that have none are left out."""
        holding = sum(self._bits.values())
        depths: dict[int, int] = {}
        get = self._holders.get
        for depth, block in enumerate(hashes):
            here = get(block, 0) & holding
            if here != holding:
                depths[depth] = holding & ~here
                holding = here
                if not holding:
                    break
        depths[len(hashes)] = holding
        return {
            worker: depth
            for depth, dropped in depths.items()
            if depth
            for worker, bit in self._bits.items()
            if bit & dropped
        }

    @property
    def num_blocks(self) -> int:
        """Distinct blocks that somebody has."""
        return len(self._holders)

    def num_held(self, worker: WorkerName) -> int:
        """Blocks that this worker has."""
        return self._num_blocks.get(worker, 0)

    def audit(self) -> None:
        """Count every worker's blocks again. Raises LogicError where a count drifted or nobody holds an entry."""
        for worker, bit in self._bits.items():
            num_blocks = sum(bool(held & bit) for held in self._holders.values())
            if num_blocks != self._num_blocks[worker]:
                msg = f"prefix index: counted {self._num_blocks[worker]} blocks of {worker}, it has {num_blocks}"
                raise LogicError(msg)
        known = sum(self._bits.values())
        for block, held in self._holders.items():
            if not held or held & ~known:
                msg = f"prefix index: block {block} is held by {held:b} of {known:b}"
                raise LogicError(msg)

    def _store(self, worker: WorkerName, blocks: Iterable[BlockHash]) -> None:
        bit, holders, num_stored = self._bits[worker], self._holders, 0
        for block in blocks:
            held = holders.get(block, 0)
            if held & bit:
                continue
            if not held and len(holders) >= self._max_blocks:
                self.counters["unindexed_blocks"] += 1
                continue
            holders[block] = held | bit
            num_stored += 1
        self._num_blocks[worker] += num_stored
        self.counters["stored_blocks"] += num_stored

    def _remove(self, worker: WorkerName, blocks: Iterable[BlockHash]) -> None:
        bit, holders, num_removed = self._bits[worker], self._holders, 0
        for block in blocks:
            held = holders.get(block, 0)
            if not held & bit:
                continue  # there was no place for it
            num_removed += 1
            if held == bit:
                del holders[block]
            else:
                holders[block] = held & ~bit
        self._num_blocks[worker] -= num_removed
        self.counters["removed_blocks"] += num_removed

    def _free_bit(self) -> int:
        bit = 1
        while bit in self._bits.values():
            bit <<= 1
        return bit
